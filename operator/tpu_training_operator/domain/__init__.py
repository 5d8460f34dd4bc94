"""Decisions about a job as functions over values: no I/O, no clock, no randomness."""
