"""Counts as people write them, for every message with a number of things in it."""


def count(number: int, noun: str) -> str:
    """ "1 host", "4 hosts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def every(number: int, noun: str) -> str:
    """ "the worker is", "all 4 workers are"."""
    return f"the {noun} is" if number == 1 else f"all {number} {noun}s are"
