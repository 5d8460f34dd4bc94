"""`tpujob`: plan, validate and run a TPUTrainingJob from a file, and see what jobs do on a cluster."""
