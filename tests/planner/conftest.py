"""Hypothesis for this layer: no deadline, because a loaded machine is not a bug, and a blob to repeat a failure."""

from hypothesis import settings

settings.register_profile("planner", deadline=None, print_blob=True)
settings.load_profile("planner")
