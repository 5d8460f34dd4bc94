"""The training loop, whole: every replica runs exactly this, in step with all the others.

Called by `replica` once the model is placed and the optimizer is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tpu_trainer import bucket
from tpu_trainer.backends.base import Backend
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.progress import Progress
from tpu_trainer.schedule import LearningRate
from tpu_trainer.stop import StopFlag
from tpu_trainer.task import Batch, Hyperparameters, Task
from tpu_trainer.throughput import Throughput

if TYPE_CHECKING:
    from torch.optim import Optimizer

REPORT_EVERY = 10
"""Steps between reports, and between readings where reading a value makes the device wait."""


@dataclass(frozen=True)
class Trained:
    """`step`: steps done; `loss`: the global loss of the last one; `stopped`: ended early, because a replica asked."""

    step: int
    loss: float
    stopped: bool
    examples_per_second: float | None


def train(
    task: Task,
    hp: Hyperparameters,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    backend: Backend,
    progress: Progress,
    stop: StopFlag,
    evaluate_now: Callable[[int], None],
) -> Trained:
    """Makes `hp.train_steps` steps, each of `hp.accumulation_steps` batches, which are on the device already.

    Ends early once any replica's `stop` is set; all replicas end after the same step. `evaluate_now` is called with
    the number of steps done, by all replicas after the same steps; not after the last, which the caller evaluates.
    """
    model = task.model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    learning_rate = LearningRate(optimizer, hp)
    throughput = Throughput(hp.global_batch_size)
    # Made once, as data on the device: a flag built inside the step would be a constant of the compiled
    # graph, and the replica that is told to stop would run a graph of its own.
    flags = {asked: backend.to_device(torch.tensor([float(asked)])) for asked in (False, True)}
    unread: list[Tensor] = []
    losses: list[float] = []

    for step in range(1, hp.train_steps + 1):
        loss = _forward_backward(task, model, batches, hp.accumulation_steps, backend)
        sums, signals = backend.reduce_bucket(*bucket.take(parameters, loss, flags[stop()]))
        bucket.give(sums, parameters, backend.world)
        del sums
        learning_rate.set(step - 1)
        with user_code("the optimizer's step"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        backend.sync()

        unread.append(signals)
        last, due = step == hp.train_steps, step % REPORT_EVERY == 0
        if hp.evaluate_every_steps and step % hp.evaluate_every_steps == 0 and not last:
            evaluate_now(step)
            model.train()
        if not (backend.reads_free or due or last):
            continue
        # Every replica reads the same sums after the same step, so they decide alike without another
        # exchange.
        new_losses, stopping = bucket.read(unread, backend.world)
        unread.clear()
        losses += new_losses
        throughput.arrived(step, time.monotonic())
        if due or last or stopping:
            progress.training(step, losses, throughput.rate)
            losses.clear()
        if stopping and not last:
            return Trained(step, new_losses[-1], stopped=True, examples_per_second=throughput.rate)
    return Trained(hp.train_steps, new_losses[-1], stopped=False, examples_per_second=throughput.rate)


def _forward_backward(task: Task, model: nn.Module, batches: Iterator[Batch], passes: int, backend: Backend) -> Tensor:
    """The mean loss over the step's batches, the gradients of that mean left on the parameters."""
    total = _one_pass(task, model, next(batches), passes)
    for _ in range(passes - 1):
        # Each pass is sent off by itself: traced together, all their activations would be alive at once.
        backend.sync()
        total = total + _one_pass(task, model, next(batches), passes)
    return total


def _one_pass(task: Task, model: nn.Module, batch: Batch, passes: int) -> Tensor:
    """The batch's loss over `passes`, its gradients added to the parameters'."""
    with user_code("the task's loss"):
        loss = task.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserCodeError(f"the task's loss must return the mean over the batch, a tensor of shape [], got {found}")
    if passes > 1:
        loss = loss / passes
    with user_code("the backward pass"):
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
