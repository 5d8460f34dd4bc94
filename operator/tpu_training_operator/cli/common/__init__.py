"""What the commands share: the job file, the cluster, text for terminals."""
