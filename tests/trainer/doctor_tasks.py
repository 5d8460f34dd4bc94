"""Tasks that each do what a task should not, for the doctor to find. Entry points of the doctor's process tests."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.trainer import tasks
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.contract.clock import WARM_UP_STEPS
from tpu_trainer.doctor.counts import WINDOW_STEPS

WIDE = 1001
"""Features that do not fill their tiles, and enough weights to matter."""


def _window(number: int) -> range:
    """The steps over which the doctor takes its `number`-th rates."""
    first = WARM_UP_STEPS + 1 + number * WINDOW_STEPS
    return range(first, first + WINDOW_STEPS)


ITEM, FALLBACK, CUT = _window(1), _window(3), _window(5)
"""Steps in which the task reads a value, uses an operation that XLA lacks, and ends the traced program half-way."""

OTHER_SHAPE = 140
"""The step whose batch is one column narrower."""

SLOW_INPUT_FROM = 150

STEPS = 300


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        filled = nn.functional.pad(x, (0, WIDE - x.shape[1]))
        return self.head(torch.tanh(self.body(filled)))


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((16,), index / 10_000)


def every_pitfall(hp: Hyperparameters) -> Task:
    """Does all that slows a step, one thing at a time."""
    made, asked = 0, 0
    began, pause = 0.0, 0.02

    def collate(rows: list[Tensor]) -> Tensor:
        nonlocal made, began, pause
        made += 1
        # Twice as long as a step takes on this machine, which may be busy.
        if made == 50:
            began = time.monotonic()
        elif made == 100:
            pause = max(pause, 2 * (time.monotonic() - began) / 50)
        if made >= SLOW_INPUT_FROM:
            time.sleep(pause)
        batch = torch.stack(rows)
        return batch[:, :-1] if made == OTHER_SHAPE else batch

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        result = model(batch).square().mean()
        if asked in ITEM:
            result.item()
        if asked in FALLBACK:
            torch.unique(batch.round())
        if asked in CUT:
            import torch_xla

            torch_xla.sync()
        return result

    return Task(model=Wide(), train=Rows(), loss=loss, collate=collate)


def evaluation_reads(hp: Hyperparameters) -> Task:
    """Its metrics do all that a step should not: nobody minds."""

    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        features, labels = batch
        torch.unique(features).sum().item()
        return {"accuracy": (model(features).argmax(1) == labels).float()}

    examples = tasks.examples()
    return Task(model=tasks.Network(), train=examples, loss=tasks.loss, evaluation=examples, metrics=metrics)


def one_host_runs_another_program(hp: Hyperparameters) -> Task:
    """Host 1 adds a term of its own to the loss."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result = tasks.loss(model, batch)
        return result + batch[0].mean() if os.environ["TPUJOB_HOST_INDEX"] == "1" else result

    return Task(model=tasks.Network(), train=tasks.examples(), loss=loss)


def one_hosts_parameters_drift(hp: Hyperparameters) -> Task:
    """In step 5 one bit of one parameter of host 1 is not what it is on the others."""

    class Drifting(torch.optim.SGD):
        steps = 0

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            result = super().step(closure)
            self.steps += 1
            if self.steps == 5 and os.environ["TPUJOB_HOST_INDEX"] == "1":
                model.head.bias.view(torch.int32)[2] ^= 1
            return result

    model = tasks.Network()

    def optimizer(parameters: Iterable[nn.Parameter], hp: Hyperparameters) -> torch.optim.Optimizer:
        return Drifting(parameters, lr=hp.learning_rate)

    return Task(model=model, train=tasks.examples(), loss=tasks.loss, optimizer=optimizer)


def one_host_is_slow(hp: Hyperparameters) -> Task:
    """A step of host 1 takes 30 ms longer."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if os.environ["TPUJOB_HOST_INDEX"] == "1":
            time.sleep(0.03)
        return tasks.loss(model, batch)

    return Task(model=tasks.Network(), train=tasks.examples(), loss=loss)


def dataset_blocks(hp: Hyperparameters) -> Task:
    """The 100th example never comes."""
    examples, given = tasks.examples(), 0

    class Blocking(Dataset[tuple[Tensor, ...]]):
        def __len__(self) -> int:
            return len(examples)

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            nonlocal given
            given += 1
            if given == 100:
                threading.Event().wait()
            return examples[index]

    return Task(model=tasks.Network(), train=Blocking(), loss=tasks.loss)


def native_code_blocks(hp: Hyperparameters) -> Task:
    """The fifth call of the loss never comes back from C, where no signal is noticed by Python."""
    calls = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            print("blocks now", flush=True)
            library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
            library.pthread_mutex_init(mutex, None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        return tasks.loss(model, batch)

    return Task(model=tasks.Network(), train=tasks.examples(), loss=loss)
