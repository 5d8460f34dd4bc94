"""Counts as people say them. Used in every message that counts something."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def every(number: int, noun: str) -> str:
    """ "the worker is", "all 4 workers are"."""
    return f"the {noun} is" if number == 1 else f"all {number} {noun}s are"
