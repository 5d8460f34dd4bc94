"""The commands that look at a job file: plan, validate, topologies, crd."""
