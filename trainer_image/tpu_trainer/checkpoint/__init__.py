"""Checkpoints: written so that a torn one is never taken for a whole one, read so that a run continues exactly."""
