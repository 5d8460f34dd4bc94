"""Whole runs in this process: `run_replica` as it stands, a thread for each replica, sums in place of collectives.

Much faster than processes, and the models can be looked at afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.trainer.gang_processes import run_spec
from tests.trainer.in_threads import ThreadBackend, in_threads
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.loop import preparation
from tpu_trainer.loop.entrypoint import Loaded
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.task import Hyperparameters, Task
from tpu_trainer.worker import replica

Made = Callable[[Hyperparameters, int], Task | Loaded]
"""A task for the replica of a rank."""


class Never:
    """Nobody asks for a stop."""

    def __call__(self) -> bool:
        return False

    def arrived(self) -> bool:
        return False


class Stopping(Never):
    """Asks for a stop, to end the run after `step`. A replica asks once before its first step, and once in each."""

    def __init__(self, step: int) -> None:
        self._calls, self._last = count(), step

    def __call__(self) -> bool:
        return next(self._calls) >= self._last


@dataclass
class Ran:
    """How every replica ended, with which model, and what rank 0 said: `progress` has the lines of its file."""

    outcomes: list[Outcome]
    models: list[nn.Module]
    warnings: tuple[str, ...]
    losses: list[float]
    norms: list[float]
    evaluated: list[int]
    total_steps: int

    @property
    def outcome(self) -> Outcome:
        """The one that all replicas have."""
        assert len({outcome.code for outcome in self.outcomes}) == 1, self.outcomes
        return self.outcomes[0]

    def weights(self, rank: int = 0) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.models[rank].parameters()]

    def assert_replicas_equal(self) -> None:
        for rank in range(1, len(self.models)):
            for ours, others in zip(self.weights(), self.weights(rank), strict=True):
                assert torch.equal(ours, others)


def run(made: Made, replicas: int = 1, *, stop: Callable[[], bool] | None = None, **spec: Any) -> Ran:
    """`spec`: changes to `run_spec`; `recipe` is its optimizer. It is plain SGD, 40 steps of 16, unless they say so."""
    plain = {"name": "sgd", "learningRate": "0.1"}
    batch = spec.pop("batch", {"global": 16, "perReplica": 16 // replicas})
    optimizer = spec.pop("recipe", plain)
    document = run_spec(hosts=replicas, replicas=replicas, batch=batch, **{"trainSteps": 40, "warmupSteps": 0, **spec})
    parsed = parse_run_spec({**document, "optimizer": optimizer})
    said: dict[int, Any] = {}
    models: dict[int, nn.Module] = {}

    def one(backend: ThreadBackend) -> Outcome:
        def load(entrypoint: str, hp: Hyperparameters, loop: str, share: Any) -> Loaded:
            given = made(hp, backend.rank)
            loaded = given if isinstance(given, Loaded) else Loaded(given, given.hooks or Hooks())
            models[backend.rank] = loaded.task.model
            return loaded

        class Noted(ProgressLog):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                self.losses: list[float] = []
                self.norms: list[float] = []
                self.evaluated: list[int] = []
                said[backend.rank] = self

            def add_sample(self, sample: Any) -> None:
                super().add_sample(sample)
                self.losses.extend(sample.losses)
                self.norms.extend(sample.gradient_norms)

            def add_evaluation(self, step: int, metrics: Any) -> None:
                super().add_evaluation(step, metrics)
                self.evaluated.extend([step] if metrics else [])

        here.load, here.progress, here.backend = load, Noted, backend
        where = WorkerEnvironment(Path("run.json"), backend.rank, replicas, "", 0)
        outcome = replica.run_replica(parsed, where, stop or Never(), _never_dies)
        if not outcome.ended_well:
            # A replica that waits for this one must not wait forever.
            raise Ended(outcome)
        return outcome

    here = threading.local()
    with (
        mock.patch.object(preparation, "load_entrypoint", lambda *given: here.load(*given)),
        mock.patch.object(replica, "open_backend", side_effect=lambda *given: here.backend),
        mock.patch.object(replica, "ProgressLog", lambda *given, **named: here.progress(*given, **named)),
    ):
        outcomes = in_threads(replicas, one, keep=Ended)
    ended = [outcome.outcome if isinstance(outcome, Ended) else outcome for outcome in outcomes]
    first, ordered = said[0], [models[rank] for rank in sorted(models)]
    return Ran(ended, ordered, first.warnings, first.losses, first.norms, first.evaluated, parsed.last_step)


class Ended(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def _never_dies(outcome: Outcome) -> Any:
    raise AssertionError(outcome.message)
