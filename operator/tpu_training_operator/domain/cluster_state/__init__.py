"""Values that describe what the cluster holds and what the workers report. Nothing here decides."""
