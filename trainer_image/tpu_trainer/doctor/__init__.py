"""Watches a run for what makes data-parallel training on XLA slow or wrong, and says what to do about it."""
