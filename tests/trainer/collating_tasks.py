"""A task whose batches XLA does not take, without the Lightning that its test imports: two seconds in each host."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from tests.trainer import tasks
from tpu_trainer import Task


def packed(examples: Any) -> Any:
    return pack_sequence([features for features, _ in examples])


def nested(examples: Any) -> Any:
    return torch.nested.nested_tensor([features for features, _ in examples])


def collated(how: str) -> Task:
    return Task(nn.Linear(8, 1), tasks.examples(), tasks.loss, collate={"packed": packed, "nested": nested}[how])
