"""Input without a training: how fast batches come, and how fast they come to the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from bench.trainer.models import SEED, loader
from bench.trainer.reports import due, report
from tpu_trainer import Task
from tpu_trainer.data.batch_source import open_data, read_batches
from tpu_trainer.data.order import Order, Share
from tpu_trainer.gang.backends.xla_device import XlaDevice


def plain(task: Task, batch: int, steps: int) -> None:
    _take(loader(task, batch), steps, "cpu")


def by_hand(task: Task, batch: int, steps: int) -> None:
    _take(MpDeviceLoader(loader(task, batch), torch_xla.device()), steps, "xla")


def ours(task: Task, batch: int, steps: int) -> None:
    data = open_data(task, Order(batch, SEED, Share(0, 1)))
    with XlaDevice().feed(read_batches(task, data, 0)) as batches:
        _take((images for images, _ in batches), steps, "xla")


def _take(batches: Iterable[Any], steps: int, device: str) -> None:
    for step, (images, _) in zip(range(1, steps + 1), batches, strict=False):
        assert images.device.type == device
        if due(step, steps):
            report(step, 0.0)
