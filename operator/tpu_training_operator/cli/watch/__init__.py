"""The commands that read a job in a cluster: status, watch, logs."""
