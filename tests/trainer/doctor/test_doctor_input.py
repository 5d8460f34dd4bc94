"""What the doctor says of input is what faster input would gain: whole runs on a clock that only their input and their
device move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Semaphore
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import ConcatDataset, default_collate

from tests.trainer import tasks
from tests.trainer.gang_processes import run_spec
from tests.trainer.in_process import Run, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.contract.clock import Clock
from tpu_trainer.gang.backends.feed import feed_ahead
from tpu_trainer.gang.backends.solo import SoloGroup
from tpu_trainer.gang.backends.torch_dist import TorchDistributed
from tpu_trainer.worker import replica

DEVICE = 0.05
"""The seconds that the device works on a step."""

STEPS = 100


class World:
    """The seconds of a run. `read`: how many a batch takes; each is read while the device works, and is ready at the
    earliest when the loop has found that it is late."""

    def __init__(self, read: float) -> None:
        self.now = self.busy_until = 0.0
        self._read, self._ready_at, self._late = read, 0.0, Semaphore(0)

    def pass_until(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def read(self) -> None:
        assert self._late.acquire(timeout=60), "the loop has not asked for the next batch"
        self._ready_at += self._read
        self.pass_until(self._ready_at)

    def is_late(self) -> None:
        self._late.release()


WORLD = World(0.0)


class Lagging(TorchDistributed):
    """Its device works on a step after the sync has sent it off, as XLA's do."""

    def sync(self) -> None:
        super().sync()
        WORLD.pass_until(WORLD.busy_until)
        WORLD.busy_until = WORLD.now + DEVICE

    def feed(
        self, batches: Iterator[tuple[Any, Any]], busy: Callable[[], AbstractContextManager[None]] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        assert busy is not None

        def run_dry() -> None:
            with busy():
                WORLD.pass_until(WORLD.busy_until)
            WORLD.is_late()

        return feed_ahead(batches, self.to_device, run_dry)


def task(hp: Hyperparameters) -> Task:
    def collate(rows: list[Any]) -> Any:
        WORLD.read()
        return default_collate(rows)

    # One epoch: at the end of one, the loop syncs once more.
    examples = ConcatDataset([tasks.examples()] * STEPS)
    return Task(model=tasks.Network(), train=examples, loss=tasks.loss, collate=collate)


def trained(read: float, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(f"{__name__}.WORLD", World(read))
    spec = run_spec(replicas=1, entrypoint=f"{__name__}:task", trainSteps=STEPS)
    lagging = Lagging(SoloGroup(1), torch.device("cpu"))
    with (
        mock.patch.object(replica, "open_backend", return_value=lagging),
        mock.patch.object(replica, "Clock", return_value=Clock(lambda: WORLD.now)),
    ):
        ran = run(spec, directory)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    return ran


@pytest.mark.parametrize("read", [0.1, 0.2])
def test_the_share_of_input_is_what_free_input_would_gain(
    read: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, free = (trained(seconds, tmp_path, monkeypatch) for seconds in (read, 0.0))
    with_input, without = (ran.recorded.document["examples_per_second"] for ran in (bound, free))
    (said,) = bound.warnings
    assert said.startswith(f"{1 - with_input / without:.0%} of the time is spent waiting for the next batch")
    assert with_input == pytest.approx(16 / read)
    assert free.warnings == []


def test_input_that_is_late_in_every_step_but_ready_before_the_device_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = trained(0.99 * DEVICE, tmp_path, monkeypatch)
    assert ran.recorded.document["examples_per_second"] == pytest.approx(16 / DEVICE)
    assert ran.warnings == []
