"""Cuts what people read to the room there is for it."""

from collections.abc import Sequence


def cut(text: str, most: int) -> str:
    """Returns the text, if need be without its end, in `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def several(names: Sequence[str], most: int) -> str:
    """Returns the first `most` names, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")
