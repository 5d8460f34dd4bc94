"""Watches a run for what makes data-parallel training on XLA slow or wrong, and says it so that a person can act."""
