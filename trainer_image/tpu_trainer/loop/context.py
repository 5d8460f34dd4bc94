"""What every part of a replica's run needs, whichever loop makes its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.clock import Clock, StartTimes, StepPace
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import PreemptedError
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.data.order import GENERATORS, Share, seed_generators
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.reporting.run_outputs import RunOutputs


@dataclass(frozen=True)
class RunContext:
    spec: RunSpec
    environment: WorkerEnvironment
    stop: StopFlag
    backend: Backend
    clock: Clock
    pace: StepPace
    outputs: RunOutputs
    die: Callable[[Outcome], NoReturn]
    """Ends this process with an outcome, from any thread."""
    start_times: StartTimes = field(default_factory=StartTimes)

    @property
    def share(self) -> Share:
        """Returns the replica's part of each batch."""
        return Share(self.backend.rank, self.backend.world, self.backend.local_rank)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seeds random numbers inside, on the device, too, so that what is built there is the same on all replicas."""
        with GENERATORS:
            seed_generators(seed)
            torch.manual_seed(seed)
            self.backend.seed(seed)
            yield

    def begin(self, step: int) -> None:
        """Begins the training after `step`.

        Raises:
            PreemptedError: on all replicas, if one is to stop. This is checked before anything is compiled, which takes
                minutes; the newest checkpoint stays the newest.
        """
        self.outputs.begin(step)
        if any(asked for (asked,) in self.backend.gather([float(self.stop())])):
            raise PreemptedError("stopped on request before the first step")
