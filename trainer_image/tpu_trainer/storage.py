"""Where this run's checkpoints are: which one it continues from, and how it takes new ones.

The replica that reports, on host 0, chooses the checkpoint, because a listing may differ from host to host. It tells
the others with the one collective that needs no model, and they read that same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_trainer.backends.base import Backend
from tpu_trainer.checkpoint.catalogue import Found, Target, as_row, find, from_row, prepare
from tpu_trainer.checkpoint.checkpointer import Checkpointer, Checkpoints, Due
from tpu_trainer.checkpoint.commit import Author
from tpu_trainer.checkpoint.origin import Elsewhere, choose_elsewhere, choose_own
from tpu_trainer.checkpoint.snapshot import Snapshot, fingerprint, take_snapshot
from tpu_trainer.checkpoint.store import open_store
from tpu_trainer.data import Position
from tpu_trainer.doctor.findings import Finding
from tpu_trainer.doctor.finite import Health
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.resume import Start, continued, document, fresh
from tpu_trainer.spec import RunSpec
from tpu_trainer.task import Hyperparameters
from tpu_trainer.telling import Telling
from tpu_trainer.trainable import Work

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Storage:
    """`target`: None for a run without checkpoints. `elsewhere`: where the run begins while it has none of its own."""

    target: Target | None
    elsewhere: Elsewhere | None = None

    @staticmethod
    def of(spec: RunSpec, model: nn.Module, backend: Backend) -> Storage:
        """`model` is as the task made it.

        Raises:
            BadSpecError: checkpoint.uri or checkpoint.resumeFrom is not a place for checkpoints.
        """
        if spec.checkpoint is None:
            return Storage(None)
        author = Author(
            uid=spec.job.uid,
            attempt=spec.job.attempt,
            fingerprint=fingerprint(model, spec.entrypoint, spec.seed),
            world=backend.world,
            global_batch=spec.batch.total,
            name=f"{spec.job.namespace}/{spec.job.name}",
            recipe=_written(spec),
        )
        named = spec.checkpoint.resume_from
        target = Target(open_store(spec.checkpoint.uri), author, spec.checkpoint.keep)
        return Storage(target, None if named is None else Elsewhere.at(named))

    def choose(self, backend: Backend, host: int, telling: Telling) -> Found | None:
        """The checkpoint to continue from, the same in every process; None if there is none. A collective.

        Raises:
            UserCodeError: the checkpoints found may not be meant for this job, or there is none where one was named.
            StorageError: the storage refuses, or this host cannot see what the reporting replica has chosen.
        """
        if self.target is None:
            return None
        own, found, away = self.target.store, None, False
        if telling.aloud:
            found, away = self._chosen(telling)
            # After the choice, which names what it passes over: this removes torn checkpoints of this job.
            prepare(self.target)
        rows = backend.gather([float(telling.aloud), float(away), *as_row(found.folder if found else None)])
        if telling.aloud:
            return found
        from_away, *name = next(row for aloud, *row in rows if aloud)
        folder = from_row(name)
        store = self.elsewhere.store if self.elsewhere is not None and from_away else own
        return None if folder is None else find(store, folder, host)

    def checkpoints(self, spec: RunSpec, work: Work, telling: Telling, resumed: bool) -> Checkpoints:
        """How the loop takes checkpoints. The reporting replica writes them, since all replicas hold the same."""
        if spec.checkpoint is None or self.target is None:
            return Checkpoints()
        due = Due(spec.checkpoint.every_steps, spec.checkpoint.every_minutes, work.hp.train_steps)
        if not telling.aloud:
            return Checkpoints(due)

        def take(step: int, position: Position, health: Health) -> Snapshot:
            kept = document(work.start, step, position, work.rates.present, work.hp, health)
            kept |= {"rates": work.rates.state(), "growth": work.growth.state(), "logged": work.logbook.state()}
            with user_code("the state of the task's hooks"):
                state = work.hooks.state()
            average = None if work.average is None else work.average.tensors
            return take_snapshot(work.task.model, work.optimizer, state, step, int(kept["examples"]), kept, average)

        def warn(text: str) -> None:
            telling.finding(Finding("Checkpoint", checkpointer.last_step or 0, text))

        checkpointer = Checkpointer(self.target, due, take, warn, resumed=work.start.step if resumed else None)
        return checkpointer

    def _chosen(self, telling: Telling) -> tuple[Found | None, bool]:
        """The checkpoint, and whether it is at checkpoint.resumeFrom."""
        assert self.target is not None
        author, say = self.target.author, telling.progress.say
        found = choose_own(
            self.target.store, author, self.elsewhere, say, lambda text: telling.finding(Finding("Checkpoint", 0, text))
        )
        if found is not None or self.elsewhere is None:
            return found, False
        return choose_elsewhere(self.elsewhere, author, say), True


def _written(spec: RunSpec) -> dict[str, str]:
    """What the user wrote, by field path; the run spec holds the parameters and the data apart from the recipe."""
    parameters = {f"recipe.parameters.{name}": value for name, value in spec.parameters.items()}
    data = {} if spec.data_uri is None else {"data.uri": spec.data_uri}
    return {**spec.recipe, **parameters, **data}


def start_of(found: Found | None, hp: Hyperparameters, spec: RunSpec) -> Start:
    """Where the run begins, with the checkpoint `found` or without one."""
    if found is None:
        return fresh(hp, spec.slice.replicas, spec.job.attempt)
    return continued(found.snapshot.document, hp, spec.slice.replicas, spec.job.attempt)


def nothing_left(start: Start, found: Found | None, hp: Hyperparameters) -> str | None:
    """What to say of a run that has no steps left; None if it has some."""
    if found is None or start.step < hp.train_steps:
        return None
    return (
        f"nothing left to train: checkpoint {found.folder} of job {found.commit.author} is at step {start.step} of "
        f"{hp.train_steps}"
    )


def tell_origin(start: Start, found: Found, me: Author, hp: Hyperparameters, telling: Telling) -> None:
    """Says what the run continues from, as a warning if the user may not expect it.

    `me`: this job.

    Raises:
        UserCodeError: checkpoint.resumeFrom names another job's checkpoint, and no steps are left to train.
    """
    author, done = found.commit.author, nothing_left(start, found, hp)
    named = not me.may_continue(author)
    if done is not None and named:
        raise UserCodeError(f"checkpoint.resumeFrom: {done}; raise recipe.trainSteps to train on")
    line = done or _resumed(start, found, hp)
    telling.progress.resumed(start.step, line)
    if done is not None or not (named or me.uid == author.uid):
        telling.finding(Finding("Checkpoint", start.step, line))


def _resumed(start: Start, found: Found, hp: Hyperparameters) -> str:
    line = (
        f"continues from checkpoint {found.folder} of job {found.commit.author}, with step {start.step + 1} of "
        f"{hp.train_steps}"
    )
    if found.commit.author.global_batch == hp.global_batch_size:
        return line
    left = (hp.train_steps - start.step) * hp.global_batch_size
    ramp = f"; the learning rate is reached over {start.ramp.steps} steps" if start.ramp else ""
    return (
        f"{line}: {start.examples} examples were seen with a global batch of {found.commit.author.global_batch}, the "
        f"{left} that are left are trained with one of {hp.global_batch_size}{ramp}"
    )
