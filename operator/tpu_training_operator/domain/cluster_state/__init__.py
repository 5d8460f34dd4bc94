"""What the cluster holds and the workers report, as values; nothing here decides."""
