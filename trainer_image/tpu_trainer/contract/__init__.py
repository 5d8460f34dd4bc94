"""What the trainer and the operator agree on: the run spec, exit codes, limits, outcome. It needs no torch."""
