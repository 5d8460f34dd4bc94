"""Connects the loop to the clock, the doctor, the checkpoints and the reports.

`loop` calls one method at each point of a step. None of them changes what is trained; some end a run that must not
continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from tpu_contract.protocol import Phase
from tpu_trainer.checkpoint.checkpointer import Checkpoints
from tpu_trainer.checkpoint.resume import Start
from tpu_trainer.contract.clock import process_seconds
from tpu_trainer.contract.errors import NotFiniteError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.data.order import Position
from tpu_trainer.doctor.doctor import Doctor
from tpu_trainer.doctor.last_weights import Closing
from tpu_trainer.gang.exchange import MOST_STEPS, Loss, Signals, StepResults
from tpu_trainer.loop.buffers import Buffers
from tpu_trainer.loop.context import RunContext
from tpu_trainer.optim.adascale import GAIN, RATE
from tpu_trainer.reporting.history import FirstLossTime, Sample
from tpu_trainer.reporting.profile import ProfileCapture
from tpu_trainer.reporting.throughput import NoiseMeter, Throughput, Utilisation
from tpu_trainer.task.logbook import Logbook, LoggedCurve
from tpu_trainer.task.task import Batch, Hyperparameters

if TYPE_CHECKING:
    from torch import Tensor, nn

REPORT_EVERY = MOST_STEPS
"""Steps between reports."""

CHECKUP_EVERY = 100
"""Steps between the doctor's own collectives: who is slow, whose parameters differ."""


class Instruments:
    """Watches one run of either loop.

    merge_positions: returns the whole job's position in the data from this process's; a collective.
    """

    def __init__(
        self,
        context: RunContext,
        model: nn.Module,
        hp: Hyperparameters,
        start: Start,
        checkpoints: Checkpoints,
        logbook: Logbook,
        checksum: Callable[[], str],
        *,
        closing: Closing | None = None,
        noise: NoiseMeter | None = None,
        average: Mapping[str, Tensor] | None = None,
        known_steps: bool = True,
    ) -> None:
        """`logbook`: what the task logs. `checksum`: returns that of the weights; a collective. `closing`: keeps it for
        the next checkpoint. `noise`: None unless the noise scale is asked for. `average`, `known_steps`: see
        `Doctor`."""
        # A module that makes its own steps does not accumulate, whatever the run spec says.
        batch = replace(context.spec.batch, accumulation=hp.accumulation_steps, per_replica=hp.per_replica_batch_size)
        spec, self.backend, self.outputs = replace(context.spec, batch=batch), context.backend, context.outputs
        self.clock, self.checkpoints, self.logbook, self.noise = context.clock, checkpoints, logbook, noise
        self.start_times = context.start_times
        self.doctor = Doctor(
            spec,
            self.backend,
            self.clock,
            self.outputs.add_finding,
            model=model,
            host=context.environment.host_index,
            pace=context.pace,
            health=start.health,
            average=average,
            known_steps=known_steps,
        )
        judged = spec.judge_after_steps
        self.judged_at = None if judged is None else min(start.step + judged, spec.train_steps)
        """The step after which the first steps of the job on top of a ladder are judged."""
        self.batch, self.throughput = hp.global_batch_size, Throughput(hp.global_batch_size, start.step)
        self.utilisation = Utilisation(spec, self.backend.terms)
        self._profile = None
        if (profile := spec.report.profile) and self.outputs.is_reporter:
            is_torch = spec.backend == "torch"
            self._profile = ProfileCapture(self.outputs, profile.steps, start.step, with_torch=is_torch)
        self.buffers = Buffers(model, self.backend)
        self.merge_positions: Callable[[Position], Position] = lambda position: position
        self.closing = closing or Closing()
        self._checksum, self.first, self._on_lower_rung = checksum, start.step, spec.end_after_steps is not None
        self.checked_program = spec.checked_program
        self.position: Position | None = None
        """The whole job's position in the data at the newest save."""
        self.saved: tuple[int, str] | None = None
        """The step of the newest save, and the checksum of its weights."""
        self.evaluated: tuple[int, str] | None = None
        """The step of the last evaluation, and the checksum of its weights."""
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._gains: list[tuple[int, float]] = []
        self._read_through = self.first
        # Of the steps that have not been read, and of those that have not been reported.
        self._rates: dict[int, float] = {}
        self._learning_rates: dict[int, float] = {}
        self._begun = self._since = time.monotonic()
        self._split = self.clock.seconds()
        self._steps = 0

    def sampling(self, batches: Iterator[tuple[Batch, Position]]) -> Iterator[tuple[Batch, Position]]:
        """Yields the batches, and charges the wait for them to Phase.INPUT, and all other time to Phase.HOST. While the
        device is busy the wait is the device's (`Backend.feed`): faster input would not end it."""
        self.clock.enter(Phase.HOST)

        def timed() -> Iterator[tuple[Batch, Position]]:
            while True:
                with self.clock.during(Phase.INPUT):
                    sample = next(batches)
                yield sample

        return timed()

    def device_time(self) -> AbstractContextManager[None]:
        """Returns a context that charges its block to Phase.DEVICE."""
        return self.clock.during(Phase.DEVICE)

    def warn(self, check: str, text: str) -> None:
        self.outputs.add_finding(Finding(check, self.first, text))

    def settle(self, step: int) -> None:
        """Runs what hooks left pending when an epoch ended with `step`: the next step would be another program."""
        self.logbook.end_epoch(step)
        with self.doctor.set_aside():
            self.backend.sync()

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Watches a step's forward and backward passes, which are the block."""
        # Only where it is reported. On v2 and v3 two replicas are threads of one process: if both meet an operation
        # first in a dispatch mode, an assertion of PyTorch 2.9 may fail (c10/core/PyHandleCache.h).
        counting = self.utilisation.counting() if self.outputs.is_reporter else nullcontext()
        with self.logbook.passes(), counting:
            yield

    @contextmanager
    def exchange(self, step: int, loss: Loss, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Watches the exchange, which is the block: a collective on the host waits for the others in it.

        Raises:
            DivergedError, PeerLostError: as `Doctor.before_sync`.
        """
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        self.doctor.before_sync(step, chain(loss.tensors, gradients, self.logbook.pending()))
        with self.clock.during(Phase.DEVICE):
            yield

    @contextmanager
    def sync(self, step: int, batch: Batch, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Watches the sync that sends the step to the device, which is the block. `batch`: the last pass's.

        Raises:
            DivergedError, PeerLostError: as `exchange`.
        """
        self.doctor.before_sync(step, parameters)
        # A first step differs: it has no optimizer state yet.
        if step == self.first + 2 and self.checked_program is not None and self.outputs.is_reporter:
            self._compare_program(step, self.checked_program)
        with self.clock.during(Phase.DEVICE):
            yield
        self.doctor.after_step(step, batch)
        if not self.start_times.over:
            self.start_times.first_step_made(self.backend.counters().compile_seconds)
            self.outputs.progress.say(str(self.start_times))

    def _compare_program(self, step: int, checked: str) -> None:
        try:
            self.outputs.add_program(step, self.backend.compare_program(checked))
        except Exception as error:
            # The text of a program is not worth the run, and classes of the user's are asked for it, too.
            text = "could not tell whether this is the program that the entry check has compiled"
            self.outputs.progress.say(f"step {step}: {text}: {error}")

    def read(self, signals: Signals, step: int, learning_rate: float, *, read_all: bool) -> StepResults | None:
        """Reads the signals that are due after `step`, or all of them. `learning_rate`: the one of `step`.

        Raises:
            NotFiniteError: on all replicas, if the run must not continue.
        """
        self._rates[step] = learning_rate
        with self.clock.during(Phase.DEVICE):
            results = signals.read(step, all_steps=read_all or step == self.judged_at)
        if results is None:
            return None
        if not self._steps and (seconds := process_seconds()) is not None:
            counters = self.backend.counters()
            self.outputs.add_first_loss(FirstLossTime(seconds, counters.compilations, counters.compile_seconds))
        step = self._read_through = signals.read_through
        first = step - len(results.losses) + 1
        self._rates |= {first + place: row[RATE] for place, row in enumerate(results.gains)}
        self._gains += [(first + place, row[GAIN]) for place, row in enumerate(results.gains)]
        self._losses += results.losses
        self._norms += results.norms
        self._learning_rates |= {earlier: self._rates.pop(earlier, learning_rate) for earlier in range(first, step + 1)}
        self._steps += len(results.losses)
        if self.logbook.read(first, results.logged):
            with self.doctor.set_aside():
                self.logbook.agree()
        # Evaluations and checkpoints are not steps and do not count in their rate.
        spent = self.clock.seconds()
        self.throughput.arrived(step, sum(spent.values()) - spent[Phase.EVALUATE] - spent[Phase.CHECKPOINT])
        if self.noise is not None:
            for replica_square, global_square in results.squares:
                self.noise.add(replica_square, global_square)
        try:
            self.doctor.finiteness.judge_steps(first, results, learning_rate)
        except NotFiniteError:
            # The steps that led to it are worth a report.
            self._report()
            raise
        return results

    def forward_begins(self) -> None:
        """Gives all replicas rank 0's buffers, if the first forward pass of a step, which follows, may read them."""
        with self.clock.during(Phase.DEVICE):
            self.buffers.step_begins(self.doctor.set_aside)

    def weights(self) -> str:
        """Returns the weights' checksum; a collective outside the steps."""
        with self.clock.during(Phase.DEVICE), self.doctor.set_aside():
            return self._checksum()

    def save(self, step: int, position: Position, *, now: bool, closes: bool = False) -> None:
        """Takes a checkpoint. `now`: the run is being stopped, so this returns once it is written. `closes`: it is the
        checkpoint of the training's end, which is written again if hooks still change the weights.

        Raises:
            NotFiniteError, DivergedError: as `Doctor.judge_parameters`, before a checkpoint is made of bad weights.
        """
        self.doctor.judge_parameters(step)
        self._report()
        self.outputs.reporter.write_soon()
        with self.clock.during(Phase.CHECKPOINT), self.doctor.set_aside():
            self.position = self.merge_positions(position)
            self.buffers.share()
        self.closing.weights = self.weights()
        self.saved = step, self.closing.weights
        self.checkpoints.closes = closes
        with self.clock.during(Phase.CHECKPOINT):
            save = self.checkpoints.save_now if now else self.checkpoints.save
            save(step, self.position, self.doctor.finiteness.health)

    def after_step(self, signals: Signals, step: int, *, ends: bool) -> None:
        """Reports what has been read, and lets the doctor compare the replicas."""
        if self._profile is not None and self._profile.is_due(step, ends=ends):
            # Not a step, and so not in their rate.
            with self.clock.during(Phase.CHECKPOINT):
                self._profile.after_step(step, ends=ends)
        is_judged = step == self.judged_at
        if step % REPORT_EVERY == 0 or ends or is_judged:
            self._report()
        # The doctor's findings decide on a rung of a ladder, so it looks at all steps.
        closes = is_judged or (ends and self._on_lower_rung)
        if closes or step % CHECKUP_EVERY == 0 or step == self.first + REPORT_EVERY:
            self.doctor.checkup(step, last=closes)
            with self.doctor.set_aside():
                # The pace of warm steps if it is known, else of all steps that have been read.
                passed = (time.monotonic() - self._begun) / max(1, self._steps)
                signals.settle_interval(self.throughput.step_seconds or passed)
        if is_judged:
            self.outputs.progress.rung = self.rung_numbers()

    def rung_numbers(self, evaluated: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """Returns what a rung of a ladder has measured up to now; None of any other run."""
        numbers, doctor = self.outputs.rung, self.doctor
        if numbers is None:
            return None
        finiteness = doctor.finiteness
        return numbers.as_json(
            self.outputs.losses,
            doctor.recompilations,
            finiteness.bad or int(not finiteness.health.clean),
            self.batch,
            self.first,
            self.throughput.rate,
            self.utilisation.of(self.throughput.step_seconds),
            doctor.unavailable_checks,
            evaluated,
        )

    def finish_log(self, step: int) -> None:
        """Reports what was logged after the last exchange. A collective."""
        with self.clock.during(Phase.DEVICE), self.doctor.set_aside():
            self.logbook.finish(step)
        self.outputs.add_curves(self.logbook.take())

    def leave(self) -> None:
        """Reports the steps since the last report, because the run has failed: without this, a failure in the first ten
        steps would leave no report."""
        self.doctor.leave()
        # The error of a full disk would replace that of the run.
        with suppress(OSError):
            self._report()

    def _report(self) -> None:
        if not self._losses:
            return
        curves = self.logbook.take()
        if self._gains:
            curves.append(LoggedCurve("gain", tuple(self._gains)))
            self._gains.clear()
        self.outputs.add_curves(curves)
        now, seconds = time.monotonic(), self.clock.seconds()
        sample = Sample(
            step=self._read_through,
            losses=tuple(self._losses),
            learning_rate=self._learning_rates[self._read_through],
            learning_rates=dict(self._learning_rates),
            seconds=now - self._since,
            split={phase: seconds[phase] - self._split[phase] for phase in Phase},
            examples_per_second=self.throughput.rate,
            mfu=self.utilisation.of(self.throughput.step_seconds),
            noise_scale=None if self.noise is None else self.noise.value,
            gradient_norms=tuple(self._norms),
            noise=None if self.noise is None else self.noise.take(self._read_through),
        )
        self.outputs.add_sample(sample, self.checkpoints.last_step)
        self._losses.clear()
        self._norms.clear()
        self._learning_rates.clear()
        self._since, self._split = now, seconds
