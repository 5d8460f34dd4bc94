"""The training loop: every replica runs exactly this, in step with all the others.

Synchronous data-parallel SGD (Goyal et al. 2017, arXiv:1706.02677, section 2) with gradient accumulation. Invariant:
every iteration starts from the same parameters, optimizer state and step on all replicas. It holds because they start
from rank 0's weights or one checkpoint, because gradients are summed before the update, and because every condition of
a collective is a function of the step, or of sums that all replicas have read. docs/backends.md has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tpu_trainer.contract.errors import user_code
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.data.epochs import watch_attributes
from tpu_trainer.data.order import Position, random_seed
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import Flags, Loss, Signals, StepResults, exchange
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.loop.trainable import PreparedTask, Trainable
from tpu_trainer.optim.adascale import RATE
from tpu_trainer.optim.update import Passes, SkippingUpdate, Update
from tpu_trainer.task.outside import OutsideParameters
from tpu_trainer.task.task import Batch

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainingResult:
    """step: steps done. loss: the global loss of the last one, None if there was none to do. position: where the data
    stands after it. stopped: ended early because a replica asked to stop. early: why an evaluation ended it."""

    step: int
    loss: float | None
    position: Position
    stopped: bool = False
    early: str | None = None


class TrainingLoop:
    """Trains from `work.start` to `hp.last_step`; a step takes `hp.accumulation_steps` batches, on the device.

    Ends early once any replica's `stop` is set, or once an evaluation asks for it; all replicas end after the same
    step. `evaluate_now`: evaluates after that many steps, on all replicas alike, and returns whether the result is the
    best so far. The caller makes the evaluation after the last step.
    """

    def __init__(
        self,
        work: PreparedTask,
        backend: Backend,
        instruments: Instruments,
        stop: StopFlag,
        evaluate_now: Callable[[int], bool],
    ) -> None:
        model, start = work.task.model, work.start
        self.work, self.backend, self.instruments = work, backend, instruments
        self.stop, self.evaluate_now = stop, evaluate_now
        warn = partial(instruments.warn, "Optimizer")
        self.trainable = Trainable(model, work.optimizer, warn)
        self.signals, self.flags = Signals(backend, start.step), Flags(backend)
        self.passes = Passes(model, work.hp.accumulation_steps, measures=work.measures)
        parts = (work.optimizer, work.hooks, work.average, work.clip_norm, backend)
        self.update = SkippingUpdate(*parts, model, instruments.doctor.set_aside) if work.skips else Update(*parts)
        self.outside = OutsideParameters(model, backend.device, warn)
        self.result, self.epoch = TrainingResult(start.step, None, start.position), start.position.epoch

    def run(self, batches: Iterator[tuple[Batch, Position]]) -> TrainingResult:
        start = self.work.start
        self._begin()
        self.samples = self.instruments.sampling(batches)
        if self.result.early is None and not start.ended:
            for step in range(start.step + 1, self.work.hp.last_step + 1):
                if self._step(step):
                    break
        if not start.ended:
            self._end()
        return self.result

    def _begin(self) -> None:
        work, start, policy = self.work, self.work.start, self.work.policy
        with user_code("the start of the training"), work.group_changes.restored():
            if start.ended:
                work.hooks.ended_before()
            else:
                work.hooks.train_begins()
                work.hooks.epoch_begins(self.epoch)
        if policy.owes(start.step) and self.evaluate_now(start.step):
            closes = policy.early_end(start.step) is not None
            self.instruments.save(start.step, start.position, now=False, closes=closes)
        self.result = replace(self.result, early=policy.early_end(start.step))

    def _step(self, step: int) -> bool:
        """Makes one step: forward and backward passes, exchange, update. Returns whether the training ends with it."""
        work, backend, instruments = self.work, self.backend, self.instruments
        loss, batch, position = self._accumulate(step)
        parameters = self._parameters(step)
        requests = self.flags.requests(stop=self.stop(), save=instruments.checkpoints.overdue())
        with instruments.exchange(step, loss, parameters):
            row = instruments.logbook.row()
            square = self.passes.take_square()
            sums = exchange(parameters, loss, requests, backend, square, row, self.passes.take())
        with user_code("the backward pass"):
            work.hooks.after_backward()
        self.trainable.watch(parameters)

        factor = None
        if work.gains is not None:
            factor, sums = work.gains.take(sums, work.rates.recipe, work.rates.base)
        work.rates.set(step - 1, factor)
        self.update.make(parameters, sums)
        # Before the sync: gradients that are alive there become outputs of the compiled graph.
        work.optimizer.zero_grad(set_to_none=True)
        with user_code("the end of a step"):
            work.hooks.step_made(step)
            work.schedules.after("step", step)
            work.hooks.after_step(batch, loss.mean, step)
        with instruments.sync(step, batch, parameters):
            backend.sync()

        self.signals.add(sums)
        return self._evaluate_and_save(step, position)

    def _parameters(self, step: int) -> list[nn.Parameter]:
        # Asked in every step: hooks may have frozen or unfrozen parameters, or added a group of them.
        return self.trainable.now(settled=step == self.work.hp.last_step or self.work.task.hooks is None)

    def _accumulate(self, step: int) -> tuple[Loss, Batch, Position]:
        """Makes the passes of a step, which add up the parameters' gradients. Returns the step's loss, its last batch,
        and where the data stands after it."""
        drawn = random_seed(self.work.hp.seed, step, self.backend.drawing_rank)
        self.backend.seed(drawn)
        batch, position = next(self.samples)
        if position.epoch != self.epoch:
            self._change_epoch(step, position.epoch)
        self.update.begins()
        with self.instruments.passes():
            loss = self._forward_backward(step, batch, drawn)
            for _ in range(1, self.work.hp.accumulation_steps):
                with user_code("the backward pass"):
                    self.work.hooks.after_backward()
                # Each pass is sent off by itself: traced together, all their activations would be alive at once.
                self.passes.keep()
                self.update.passed()
                self.backend.sync()
                batch, position = next(self.samples)
                loss = loss.plus(self._forward_backward(step, batch))
        self.update.passed()
        return loss, batch, position

    def _change_epoch(self, step: int, epoch: int) -> None:
        task, hooks, warn = self.work.task, self.work.hooks, partial(self.instruments.warn, "Data")
        with user_code("the end of an epoch"), watch_attributes(task.train, not task.workers, warn):
            self._end_epoch()
            hooks.epoch_begins(epoch)
        self.epoch = epoch
        self.instruments.settle(step - 1)

    def _end_epoch(self) -> None:
        self.work.hooks.epoch_ends(self.epoch)
        self.work.schedules.after("epoch", self.epoch + 1)

    def _forward_backward(self, step: int, batch: Batch, drawn: int | None = None) -> Loss:
        """Adds the batch's gradients to the parameters'; returns its part of the step's loss. `drawn`: the step's seed,
        in its first pass."""
        work = self.work
        with user_code("the task's loss"):
            work.hooks.step_begins(batch, step)
        if drawn is not None:
            # After the hooks, which may change buffers and the modes of modules.
            self.instruments.forward_begins()
            # An exchange of buffers is a separate program, which moves the device's generator on; the first steps of
            # every run have one, also where a run continues.
            self.backend.seed(drawn)
        with user_code("the task's loss"), self.outside.explain_errors(work.task.loss):
            loss = Loss.of(work.task.loss(work.task.model, batch), work.hp.accumulation_steps, self.backend.device)
        self.outside.look(loss.total, step)
        with user_code("the backward pass"):
            work.hooks.before_backward(loss.total)
            loss.total.backward()  # type: ignore[no-untyped-call]
        if self.passes.measures:
            self.passes.measure(self._parameters(step), loss.detached())
        return loss.detached()

    def _evaluate_and_save(self, step: int, position: Position) -> bool:
        """Reads the step's results, then evaluates, saves and reports where that is due. Returns whether the training
        ends early with this step."""
        work, instruments, every = self.work, self.instruments, self.work.hp.evaluate_every_steps
        last = step == work.hp.last_step
        evaluates, saves = every is not None and step % every == 0, instruments.checkpoints.due(step)
        read_all = evaluates or saves or last or (work.gains is not None and work.gains.may_end(step))
        # Raises if the loss is not finite, before a checkpoint is made of it.
        if results := instruments.read(self.signals, step, work.rates.current, read_all=read_all):
            last = self._read_gains(results) or last
            self.result = TrainingResult(step, results.losses[-1], position, results.stopping and not last)
            saves = saves or results.saving
        # The last step of a lower rung is in the middle of the training.
        evaluates = work.on_lower_rung if last else evaluates
        stopped, early = self.result.stopped, None
        # Before the checkpoint, which keeps what the hooks of the evaluation decide; a run that is to stop has no time.
        if evaluates and not stopped:
            saves = self.evaluate_now(step) or saves
            early = None if last else work.policy.early_end(step)
            self.result = replace(self.result, early=early)
        if saves or last or stopped or early:
            instruments.save(step, position, now=stopped, closes=last or early is not None)
        ends = last or stopped or self.result.early is not None
        instruments.after_step(self.signals, step, ends=ends)
        return ends

    def _read_gains(self, results: StepResults) -> bool:
        """Takes in AdaScale's rows. Returns whether the gains add up to the recipe's steps."""
        gains = self.work.gains
        if gains is None:
            return False
        gains.read(results.gains, self.signals.read_through)
        self.work.rates.read = results.gains[-1][RATE]
        self.instruments.outputs.progress.total = gains.expected_end
        return gains.ended

    def _end(self) -> None:
        work, result = self.work, self.result
        with user_code("the end of the training"):
            # A run that is stopped continues inside its epoch, and so does the job after a lower rung.
            goes_on = result.stopped or work.on_lower_rung
            if not goes_on:
                self._end_epoch()
            work.hooks.train_ends(stopped=goes_on or result.early is not None)
        # What they have left pending would be compiled into the evaluation.
        self.backend.sync()
