"""The training loop, whole: every replica runs exactly this, in step with all the others.

The order of the collectives is the same on every replica: whatever decides over one is a function of the step, or of
sums that all have read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tpu_trainer import bucket
from tpu_trainer.average import Average
from tpu_trainer.backends.base import Backend
from tpu_trainer.bucket import Wishes
from tpu_trainer.clock import Phase
from tpu_trainer.data import Position, random_seed
from tpu_trainer.errors import user_code
from tpu_trainer.growth import Growth
from tpu_trainer.hooks import Hooks
from tpu_trainer.instruments import Instruments
from tpu_trainer.losses import Loss, loss_of
from tpu_trainer.resume import Start
from tpu_trainer.schedule import LearningRate
from tpu_trainer.signals import MOST_STEPS, Signals
from tpu_trainer.stop import StopFlag
from tpu_trainer.task import Batch, Hyperparameters, Task
from tpu_trainer.trainable import Trainable
from tpu_trainer.update import update_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

REPORT_EVERY = MOST_STEPS
"""Steps between reports."""

CHECKUP_EVERY = 100
"""Steps between exchanges of what is told beside the bucket: who is slow, whose parameters differ."""

Batches = Iterator[tuple[Batch, Position]]


@dataclass(frozen=True)
class Work:
    """What is trained: the model is on its device, the optimizer holds the checkpoint's state if there was one.

    skips: a step that is not finite is left out (recipe.onNotFinite).
    """

    task: Task
    hooks: Hooks
    hp: Hyperparameters
    optimizer: Optimizer
    rates: LearningRate
    growth: Growth
    start: Start
    noise_scale: bool
    skips: bool
    average: Average | None = None


@dataclass(frozen=True)
class Trained:
    """`step`: steps done; `loss`: the global loss of the last one, None where there was none to do; `position`: where
    the data stands after it; `stopped`: ended early, because a replica asked."""

    step: int
    loss: float | None
    position: Position
    stopped: bool = False


def train(
    work: Work,
    batches: Batches,
    backend: Backend,
    instruments: Instruments,
    stop: StopFlag,
    evaluate_now: Callable[[int], object],
) -> Trained:
    """Makes the steps from `work.start` to `hp.train_steps`, each of `hp.accumulation_steps` batches on the device.

    Ends early once any replica's `stop` is set; all replicas end after the same step. `evaluate_now` is called with
    the number of steps done, by all replicas after the same steps; not after the last, which the caller evaluates.
    """
    task, hooks, hp, optimizer, start = work.task, work.hooks, work.hp, work.optimizer, work.start
    clock, doctor, checkpoints = instruments.clock, instruments.doctor, instruments.checkpoints
    model = task.model
    trainable = Trainable(model, optimizer)
    update = update_of(work.skips, model, optimizer, work.average, backend, doctor.set_aside)
    signals = Signals(backend, start.step)
    # Made once, as data on the device: a flag built inside the step would be a constant of the compiled
    # graph, and the replica that is told to stop would run a graph of its own.
    flags = {asked: backend.flag(asked) for asked in (False, True)}
    trained = Trained(start.step, None, start.position)
    epoch = start.position.epoch

    with user_code("the start of the training"), work.growth.taken_back():
        hooks.train_begins()
        hooks.epoch_begins(epoch)
    clock.enter(Phase.HOST)
    for step in range(start.step + 1, hp.train_steps + 1):
        last = step == hp.train_steps
        backend.seed(random_seed(hp.seed, step, backend.drawing_rank))
        with clock.during(Phase.INPUT):
            batch, position = next(batches)
        if position.epoch != epoch:
            with user_code("the end of an epoch"):
                hooks.epoch_ends(epoch)
                hooks.epoch_begins(epoch := position.epoch)
            # What they left pending would be compiled into this step, as a program of its own.
            with doctor.set_aside():
                backend.sync()
        update.begins()
        with instruments.utilisation.counting():
            loss = _one_pass(work, model, step, batch)
            for _ in range(1, hp.accumulation_steps):
                # Each pass is sent off by itself: traced together, all their activations would be alive at once.
                backend.sync()
                with clock.during(Phase.INPUT):
                    batch, position = next(batches)
                loss = loss.plus(_one_pass(work, model, step, batch))
        # Asked here, in every step: hooks may have frozen or unfrozen parameters, or added a group of them.
        parameters = trainable.now()
        doctor.before_sync(step, [*loss.tensors, *(p.grad for p in parameters if p.grad is not None)])
        wishes = Wishes(stop=flags[stop()], save=flags[checkpoints.overdue()])
        # Where the collective is the host's own, this is where it waits for the others.
        with clock.during(Phase.DEVICE):
            summed = bucket.exchange(parameters, loss, wishes, backend, squares=work.noise_scale)
        square = bucket.square([p.grad for p in parameters if p.grad is not None]) if work.noise_scale else None
        work.rates.set(step - 1)
        update.make(partial(_update, work), parameters, summed)
        # Before the sync: gradients that are alive there become outputs of the compiled graph.
        optimizer.zero_grad(set_to_none=True)
        with user_code("the end of a step"):
            hooks.after_step(batch, loss.mean, step)
        doctor.before_sync(step, parameters)
        with clock.during(Phase.DEVICE):
            backend.sync()
        doctor.after_step(step, batch)

        signals.add(summed, square)
        evaluates = hp.evaluate_every_steps is not None and step % hp.evaluate_every_steps == 0 and not last
        saves = checkpoints.due(step)
        if signals.due(step) or evaluates or saves or last:
            with clock.during(Phase.DEVICE):
                reading = signals.read(whole=evaluates or saves or last)
            if reading is not None:
                trained = Trained(step, reading.losses[-1], position, stopped=reading.stopping and not last)
                # Ends the run where the loss is not finite, before a checkpoint is made of it.
                instruments.read(signals.read_through, reading, work.rates.present)
                saves = saves or reading.saving
        if saves or last or trained.stopped:
            # Ends the run where the update has made weights that are not finite, before a checkpoint is made of them.
            doctor.judge_parameters(step)
            with clock.during(Phase.CHECKPOINT):
                instruments.save(step, position, now=trained.stopped)
        # After the reading: a run that is to stop has no time for an evaluation.
        if evaluates and not trained.stopped:
            with clock.during(Phase.EVALUATE), doctor.set_aside():
                evaluate_now(step)
        if step % REPORT_EVERY == 0 or last or trained.stopped:
            instruments.report(signals.read_through)
        if step % CHECKUP_EVERY == 0 or step == start.step + REPORT_EVERY:
            doctor.checkup(step)
            with doctor.set_aside():
                signals.settle_interval(instruments.step_seconds)
        if trained.stopped:
            break
    with user_code("the end of the training"):
        # A run that is stopped goes on inside its epoch.
        if not trained.stopped:
            hooks.epoch_ends(epoch)
        hooks.train_ends(stopped=trained.stopped)
    return trained


def _one_pass(work: Work, model: nn.Module, step: int, batch: Batch) -> Loss:
    """The batch's part in the step's loss, its gradients added to the parameters'."""
    with user_code("the task's loss"):
        work.hooks.step_begins(batch, step)
        loss = loss_of(work.task.loss(model, batch), work.hp.accumulation_steps)
    with user_code("the backward pass"):
        work.hooks.before_backward(loss.total)
        loss.total.backward()  # type: ignore[no-untyped-call]
        work.hooks.after_backward()
    return loss.detached()


def _update(work: Work) -> None:
    with user_code("the optimizer's step"):
        work.hooks.before_update(work.optimizer)
        work.hooks.update(work.optimizer)
    if work.average is not None:
        work.average.update()
