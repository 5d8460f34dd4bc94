"""Hypothesis for this layer: no deadline, since a loaded machine is no bug, and a blob to repeat a failure with."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")
