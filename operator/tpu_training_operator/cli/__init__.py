"""`tpujob`: plan, validate and run a TPUTrainingJob from a file, without a cluster."""
