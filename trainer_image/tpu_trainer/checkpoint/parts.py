"""Divides a checkpoint among the hosts: all hosts hold the same weights, so each can write a part of them.

Host 0 also writes what may differ between replicas (buffers, the state of hooks) and what is small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Item = tuple[str, str]
"""A tensor: the file that it belongs to, and its name there."""

PART_BYTES = 64 << 20
"""The smallest size of a part, unless there is only one: many small objects would cost more than they save."""

_NAME = re.compile(r"(\w+?)(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors")


@dataclass(frozen=True)
class CheckpointPart:
    """Part `number`, counted from 0, of `count`; host 0 writes the first."""

    number: int = 0
    count: int = 1

    def name(self, file: str) -> str:
        """Returns the object's name for this part of `file` ("model"), in the style of Hugging Face's libraries."""
        if self.count == 1:
            return f"{file}.safetensors"
        return f"{file}-{self.number + 1:05}-of-{self.count:05}.safetensors"


WHOLE = CheckpointPart()


def file_of(name: str) -> str | None:
    """Returns the file that an object belongs to, the inverse of `CheckpointPart.name`; None if it holds no tensors."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def divide(sizes: Mapping[Item, int], hosts: int) -> list[set[Item]]:
    """Divides the tensors into parts of nearly equal size, one for each of the first hosts. `sizes`: in bytes.

    Goes from the largest tensor to the smallest, and adds each to the part that is smallest by then. The largest part
    is at most a third larger than in the best division (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    count = max(1, min(hosts, sum(sizes.values()) // PART_BYTES))
    parts: list[set[Item]] = [set() for _ in range(count)]
    loads = [0] * count
    for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
        smallest = loads.index(min(loads))
        parts[smallest].add(item)
        loads[smallest] += sizes[item]
    return parts


def describe_layout(tensors: Mapping[Item, Tensor], parameters: Sequence[Sequence[str]]) -> str:
    """Returns a text that is equal on hosts whose names stand for the same tensors.

    `parameters`: the names in the order of the optimizer's groups. Its state is stored by number in that order, which
    differs between processes if the task takes it from a set.
    """
    layout = [[*item, str(tensor.dtype), list(tensor.shape)] for item, tensor in sorted(tensors.items())]
    return json.dumps([layout, parameters])
