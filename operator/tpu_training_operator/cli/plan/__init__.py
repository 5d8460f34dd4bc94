"""The commands that need no cluster and run nothing: plan, validate, topologies, crd."""
