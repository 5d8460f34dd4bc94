"""What the trainer and the operator agree on: the run spec, exit codes, limits, outcome. No torch needed."""
