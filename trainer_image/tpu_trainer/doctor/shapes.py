"""What a batch looks like to the compiler: shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Shapes = Mapping[str, str]
"""Where a tensor is in the batch ("batch[0]", "batch['tokens']") -> its shape and dtype ("[8, 64] int64")."""


def shapes_of(batch: Any, at: str = "batch") -> Shapes:
    """The shapes of all tensors in nested lists, tuples and mappings; what is no tensor is left out."""
    if isinstance(batch, Tensor):
        return {at: f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"}
    if isinstance(batch, Mapping):
        parts = [(f"{at}[{key!r}]", value) for key, value in batch.items()]
    elif isinstance(batch, tuple | list):
        parts = [(f"{at}[{index}]", value) for index, value in enumerate(batch)]
    else:
        parts = []
    return {place: shape for at_part, value in parts for place, shape in shapes_of(value, at_part).items()}


def difference(first: Shapes, now: Shapes) -> str | None:
    """In words where `now` differs from `first`; None where it does not."""
    changes = [
        f"{place} is {now.get(place, 'missing')}, in the first step it was {first.get(place, 'missing')}"
        for place in dict.fromkeys([*first, *now])
        if first.get(place) != now.get(place)
    ]
    return "; ".join(changes) or None
