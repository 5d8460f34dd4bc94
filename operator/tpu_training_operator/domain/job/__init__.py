"""What a job resolves to: its slices, their layout, the scaled recipe, the rungs of its ladder."""
