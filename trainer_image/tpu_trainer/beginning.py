"""How a run begins: nothing trained yet, or with the state of a checkpoint that all processes take together.

The replica that reports, on host 0, chooses, because a listing may differ from host to host; the others are told its
choice with the one collective that needs no model, and read that very checkpoint. Called by `replica`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_trainer.backends.base import Backend
from tpu_trainer.checkpoint import writing
from tpu_trainer.checkpoint.catalogue import Found, as_row, find, from_row, latest
from tpu_trainer.checkpoint.checkpointer import Checkpointer, Checkpoints, Due, NoCheckpoints
from tpu_trainer.checkpoint.commit import Author
from tpu_trainer.checkpoint.snapshot import Snapshot, fingerprint, take_snapshot
from tpu_trainer.checkpoint.store import open_store
from tpu_trainer.data import Position
from tpu_trainer.doctor.finding import Finding
from tpu_trainer.errors import user_code
from tpu_trainer.loop import Work
from tpu_trainer.resume import Start, continued, document, fresh
from tpu_trainer.spec import RunSpec
from tpu_trainer.task import Hyperparameters
from tpu_trainer.telling import Telling

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Storage:
    """Where the run's checkpoints are; `target` is None for a run without them."""

    target: writing.Target | None

    @staticmethod
    def of(spec: RunSpec, model: nn.Module, backend: Backend) -> Storage:
        """`model` is still as the task made it.

        Raises:
            BadSpecError: checkpoint.uri is no place for checkpoints.
        """
        if spec.checkpoint is None:
            return Storage(None)
        author = Author(
            uid=spec.job.uid,
            attempt=spec.job.attempt,
            fingerprint=fingerprint(model, spec.entrypoint, spec.seed),
            world=backend.world,
            global_batch=spec.batch.total,
        )
        return Storage(writing.Target(open_store(spec.checkpoint.uri), author, spec.checkpoint.keep))

    def choose(self, backend: Backend, host: int, telling: Telling) -> Found | None:
        """The checkpoint to continue from, the same in every process; None where there is none.

        Raises:
            StorageError: the storage refuses, or this host cannot see what the reporting replica has chosen.
        """
        if self.target is None:
            return None
        store, found = self.target.store, None
        if telling.aloud:
            found = latest(store, self.target.author.fingerprint, telling.progress.say)
            # After the choice, which says what it passes over: this removes what is torn and this job's own.
            writing.prepare(self.target)
        rows = backend.gather([float(telling.aloud), *as_row(found.folder if found else None)])
        if telling.aloud:
            return found
        chosen = from_row(next(row for aloud, *row in rows if aloud))
        return None if chosen is None else find(store, chosen, host)


def start_of(found: Found | None, hp: Hyperparameters, spec: RunSpec) -> Start:
    """Where the run begins with the checkpoint `found`, or without one."""
    if found is None:
        return fresh(hp, spec.slice.replicas, spec.job.attempt)
    return continued(found.snapshot.document, hp, spec.slice.replicas, spec.job.attempt)


def resumed_line(start: Start, found: Found, hp: Hyperparameters) -> str:
    """What a person reads about it."""
    line = f"continues from checkpoint {found.folder} with step {start.step + 1} of {hp.train_steps}"
    if found.commit.author.global_batch == hp.global_batch_size:
        return line
    left = (hp.train_steps - start.step) * hp.global_batch_size
    ramp = f"; the learning rate is reached over {start.ramp.steps} steps" if start.ramp else ""
    return (
        f"{line}: {start.examples} examples were seen with a global batch of {found.commit.author.global_batch}, the "
        f"{left} that are left are trained with one of {hp.global_batch_size}{ramp}"
    )


def checkpoints_of(spec: RunSpec, storage: Storage, work: Work, telling: Telling, resumed: bool) -> Checkpoints:
    """What the loop takes checkpoints with: the reporting replica writes them, for all hold the same."""
    if spec.checkpoint is None or storage.target is None or not telling.aloud:
        return NoCheckpoints()

    def take(step: int, position: Position) -> Snapshot:
        kept = document(work.start, step, position, work.rates.present, work.hp) | {"rates": work.rates.state()}
        with user_code("the state of the task's hooks"):
            state = work.hooks.state()
        average = None if work.average is None else work.average.tensors
        return take_snapshot(work.task.model, work.optimizer, state, step, int(kept["examples"]), kept, average)

    checkpointer: Checkpointer
    checkpointer = Checkpointer(
        storage.target,
        Due(spec.checkpoint.every_steps, spec.checkpoint.every_minutes, work.hp.train_steps),
        take,
        lambda text: telling.finding(Finding("Checkpoint", checkpointer.last_step or 0, text)),
        resumed=work.start.step if resumed else None,
    )
    return checkpointer
