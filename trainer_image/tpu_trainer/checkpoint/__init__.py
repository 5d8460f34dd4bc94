"""Checkpoints: a torn one is never taken for a whole one, and a run that reads one continues exactly."""
