"""What watches the loop without being part of it: clock, doctor, checkpoints, and the reports of what was read.

Made by `replica`; `loop` calls it at its fixed places.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tpu_trainer.checkpoint.checkpointer import Checkpoints
from tpu_trainer.clock import Clock, Phase
from tpu_trainer.data import Position
from tpu_trainer.doctor.doctor import Doctor
from tpu_trainer.errors import NotFiniteError
from tpu_trainer.signals import Reading
from tpu_trainer.telemetry.history import Sample
from tpu_trainer.telemetry.rates import NoiseScale, Throughput, Utilisation
from tpu_trainer.telling import Telling


@dataclass
class Instruments:
    """`noise`: None where it is not asked for."""

    clock: Clock
    doctor: Doctor
    checkpoints: Checkpoints
    throughput: Throughput
    utilisation: Utilisation
    noise: NoiseScale | None
    telling: Telling

    def __post_init__(self) -> None:
        self._losses: list[float] = []
        self._rate = 0.0
        self._since = time.monotonic()
        self._split = self.clock.seconds()
        self._begun = self._since
        self._steps = 0

    def read(self, step: int, reading: Reading, learning_rate: float) -> None:
        """`step`: the last one whose results have come.

        Raises:
            NotFiniteError: in all replicas, where the run must not go on.
        """
        self._losses += reading.losses
        self._rate = learning_rate
        self._steps += len(reading.losses)
        # Evaluations and checkpoints are no steps, and take no part in their rate.
        spent = self.clock.seconds()
        self.throughput.arrived(step, sum(spent.values()) - spent[Phase.EVALUATE] - spent[Phase.CHECKPOINT])
        if self.noise is not None:
            for own, whole in reading.squares:
                self.noise.add(own, whole)
        try:
            self.doctor.finiteness.read(step - len(reading.losses) + 1, reading, learning_rate)
        except NotFiniteError:
            # What led there is worth more than what went before.
            self.report(step)
            raise

    def save(self, step: int, position: Position, now: bool) -> None:
        """Takes a checkpoint; `now`: the run is being stopped, so this returns when it is written."""
        save = self.checkpoints.save_now if now else self.checkpoints.save
        save(step, position, self.doctor.finiteness.clean)

    @property
    def step_seconds(self) -> float:
        """The best there is: of warm steps, or else of all that have been read."""
        passed = (time.monotonic() - self._begun) / max(1, self._steps)
        return self.throughput.step_seconds or passed

    def report(self, step: int) -> None:
        """Tells what has been read since the last report; nothing where nothing has."""
        if not self._losses:
            return
        now, seconds = time.monotonic(), self.clock.seconds()
        sample = Sample(
            step=step,
            losses=tuple(self._losses),
            learning_rate=self._rate,
            seconds=now - self._since,
            split={phase: seconds[phase] - self._split[phase] for phase in Phase},
            examples_per_second=self.throughput.rate,
            mfu=self.utilisation.of(self.throughput.step_seconds),
            noise_scale=None if self.noise is None else self.noise.value,
        )
        self.telling.sample(sample, self.checkpoints.last_step)
        self._losses.clear()
        self._since, self._split = now, seconds
