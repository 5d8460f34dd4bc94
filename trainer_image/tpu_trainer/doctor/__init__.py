"""Finds what makes data-parallel training on XLA slow or wrong, and advises what to do about it."""
