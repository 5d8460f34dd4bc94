"""The commands that look at a job in a cluster: status, watch, logs."""
