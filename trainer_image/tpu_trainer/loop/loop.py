"""The training loop, whole: every replica runs exactly this, in step with all the others.

Synchronous data-parallel SGD (Goyal et al. 2017, arXiv:1706.02677, section 2) with gradient accumulation. Invariant:
every iteration starts from the same parameters, optimizer state and step on all replicas. It holds because they start
from rank 0's weights or one checkpoint, because gradients are summed before the update, and because whatever decides
over a collective is a function of the step, or of sums that all replicas have read. docs/backends.md has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tpu_trainer.contract.errors import user_code
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.data.epochs import watch_attributes
from tpu_trainer.data.loading import Position, random_seed
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import Flags, Loss, Signals, exchange
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.loop.trainable import PreparedTask, Trainable
from tpu_trainer.optim.update import EarlierPasses, SkippingUpdate, Update
from tpu_trainer.task.outside import OutsideParameters
from tpu_trainer.task.task import Batch


@dataclass(frozen=True)
class TrainingResult:
    """`step`: steps done; `loss`: the global loss of the last one, None if there was none to do; `position`: where the
    data stands after it; `stopped`: ended early because a replica asked to stop; `early`: why an evaluation ended it.
    """

    step: int
    loss: float | None
    position: Position
    stopped: bool = False
    early: str | None = None


def train(
    work: PreparedTask,
    batches: Iterator[tuple[Batch, Position]],
    backend: Backend,
    instruments: Instruments,
    stop: StopFlag,
    evaluate_now: Callable[[int], bool],
) -> TrainingResult:
    """Trains from `work.start` to `hp.last_step`; a step takes `hp.accumulation_steps` batches, on the device.

    Ends early once any replica's `stop` is set, or once an evaluation says so; all replicas end after the same step.
    Calls `evaluate_now` with the number of steps done, on all replicas after the same steps, but leaves the evaluation
    after the last to the caller. It returns whether the evaluation is the best so far.
    """
    hooks, hp, start, optimizer, checkpoints = work.hooks, work.hp, work.start, work.optimizer, instruments.checkpoints
    trainable = Trainable(work.task.model, optimizer, instruments.left_out)
    signals = Signals(backend, start.step)
    parts = (optimizer, hooks, work.average, work.clip_norm, backend)
    update = SkippingUpdate(*parts, work.task.model, instruments.doctor.set_aside) if work.skips else Update(*parts)
    flags, earlier = Flags(backend), EarlierPasses(work.task.model)
    outside = OutsideParameters(work.task.model, backend.device, instruments.left_out)
    trained, epoch = TrainingResult(start.step, None, start.position), start.position.epoch
    with user_code("the start of the training"), work.group_changes.restored():
        if start.ended:
            hooks.ended_before()
        else:
            hooks.train_begins()
            hooks.epoch_begins(epoch)
    if work.policy.owes(start.step) and evaluate_now(start.step):
        instruments.save(start.step, start.position, now=False, closes=work.policy.early_end(start.step) is not None)
    trained = replace(trained, early=work.policy.early_end(start.step))
    samples = instruments.sampling(batches)

    for step in range(start.step + 1, hp.last_step + 1) if trained.early is None and not start.ended else ():
        last = step == hp.last_step
        drawn = random_seed(hp.seed, step, backend.drawing_rank)
        backend.seed(drawn)
        batch, position = next(samples)
        if position.epoch != epoch:
            with (
                user_code("the end of an epoch"),
                watch_attributes(work.task.train, not work.task.workers, instruments.of_data),
            ):
                hooks.epoch_ends(epoch)
                hooks.epoch_begins(epoch := position.epoch)
            instruments.settle(step - 1)

        update.begins()
        with instruments.passes():
            loss = _forward_backward(work, step, batch, backend, outside, partial(_begins, instruments, backend, drawn))
            for _ in range(1, hp.accumulation_steps):
                # Each pass is sent off by itself: traced together, all their activations would be alive at once.
                earlier.keep()
                update.passed()
                backend.sync()
                batch, position = next(samples)
                loss = loss.plus(_forward_backward(work, step, batch, backend, outside))
        update.passed()
        # Asked in every step: hooks may have frozen or unfrozen parameters, or added a group of them.
        parameters = trainable.now(settled=last or work.task.hooks is None)
        requests = flags.requests(stop=stop(), save=checkpoints.overdue())
        with instruments.exchange(step, loss, parameters):
            row = instruments.logbook.row()
            sums = exchange(parameters, loss, requests, backend, work.noise_scale, row, earlier.take())
        trainable.watch(parameters)

        work.rates.set(step - 1)
        update.make(parameters, sums)
        # Before the sync: gradients that are alive there become outputs of the compiled graph.
        optimizer.zero_grad(set_to_none=True)
        with user_code("the end of a step"):
            hooks.after_step(batch, loss.mean, step)
        with instruments.sync(step, batch, parameters):
            backend.sync()

        signals.add(sums)
        due = hp.evaluate_every_steps is not None and step % hp.evaluate_every_steps == 0
        # The last step of a lower rung is in the middle of the training.
        evaluates = work.on_lower_rung if last else due
        saves = checkpoints.due(step)
        # Raises if the loss is not finite, before a checkpoint is made of it.
        if reading := instruments.read(signals, step, work.rates.current, whole=evaluates or saves or last):
            trained = TrainingResult(step, reading.losses[-1], position, stopped=reading.stopping and not last)
            saves = saves or reading.saving
        if saves or last or trained.stopped:
            instruments.save(step, position, now=trained.stopped, closes=last)
        # After the reading: a run that is to stop has no time for an evaluation.
        if evaluates and not trained.stopped:
            is_best = evaluate_now(step)
            trained = replace(trained, early=None if last else work.policy.early_end(step))
            if not (saves or last) and (is_best or trained.early):
                instruments.save(step, position, now=False, closes=trained.early is not None)
        ends = trained.stopped or trained.early is not None
        instruments.after_step(signals, step, ends=last or ends)
        if ends:
            break

    if not start.ended:
        with user_code("the end of the training"):
            # A run that is stopped continues inside its epoch, and so does the job after a lower rung.
            goes_on = trained.stopped or work.on_lower_rung
            if not goes_on:
                hooks.epoch_ends(epoch)
            hooks.train_ends(stopped=goes_on or trained.early is not None)
        # What they have left pending would be compiled into the evaluation.
        backend.sync()
    return trained


def _begins(instruments: Instruments, backend: Backend, drawn: int) -> None:
    instruments.forward_begins()
    # An exchange of buffers is a program of its own, which moves the device's generator on; the first steps of every
    # run have one, also where a run continues.
    backend.seed(drawn)


def _forward_backward(
    work: PreparedTask,
    step: int,
    batch: Batch,
    backend: Backend,
    outside: OutsideParameters,
    begins: Callable[[], None] = lambda: None,
) -> Loss:
    """The batch's part of the step's loss; adds its gradients to the parameters'. `begins`: is called after the hooks,
    which may have changed buffers, or the modes of modules."""
    with user_code("the task's loss"):
        work.hooks.step_begins(batch, step)
    begins()
    with user_code("the task's loss"), outside.explain_errors(work.task.loss):
        loss = Loss.of(work.task.loss(work.task.model, batch), work.hp.accumulation_steps, backend.device)
    outside.look(loss.total, step)
    with user_code("the backward pass"):
        work.hooks.before_backward(loss.total)
        loss.total.backward()  # type: ignore[no-untyped-call]
        work.hooks.after_backward()
    return loss.detached()
