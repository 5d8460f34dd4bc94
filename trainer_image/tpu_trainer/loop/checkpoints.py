"""Connects a run to its checkpoints: chooses the one that it continues from, and takes new ones.

The replica that reports, on host 0, chooses the checkpoint and reads it for all (`checkpoint.handover`): a listing may
differ from host to host, and a checkpoint is large. All hosts write new ones together (`checkpoint.together`); if they
do not see what host 0 writes, it writes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tpu_contract.run_spec import CheckpointSpec, RunSpec
from tpu_trainer.checkpoint.best import best_in
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, LoadedCheckpoint, PeerParts, mark_reading, prepare
from tpu_trainer.checkpoint.checkpointer import Checkpointer, Checkpoints, CheckpointSchedule, PartWriter
from tpu_trainer.checkpoint.commit import Author, Folder
from tpu_trainer.checkpoint.handover import read_once
from tpu_trainer.checkpoint.origin import CheckpointSource, choose_named, choose_own
from tpu_trainer.checkpoint.parts import WHOLE, CheckpointPart, Item
from tpu_trainer.checkpoint.resume import Start, continued_start, document, fresh_start
from tpu_trainer.checkpoint.snapshot import (
    LiveState,
    Snapshot,
    fingerprint,
    replicated_tensors,
    take_part,
    take_snapshot,
)
from tpu_trainer.checkpoint.together import Writers, find_writers, write_part
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.findings import Finding, NumericalHealth, ranges
from tpu_trainer.contract.outcome import Best
from tpu_trainer.data.loading import has_length, length_of
from tpu_trainer.data.order import Position
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.loop.evaluation_policy import reduction_of
from tpu_trainer.loop.trainable import PreparedTask
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.storage import open_store
from tpu_trainer.task.task import Hyperparameters

if TYPE_CHECKING:
    from torch import nn

Take = Callable[[int, Position, NumericalHealth, bool], Snapshot]
"""Makes the snapshot of a step, whole or as the first of several parts."""


@dataclass(frozen=True)
class CheckpointStorage:
    """Where a run's checkpoints are. target: None for a run without checkpoints. source: where the run begins while it
    has no checkpoint of its own."""

    target: CheckpointTarget | None
    source: CheckpointSource | None = None

    @staticmethod
    def of(spec: RunSpec, model: nn.Module, backend: Backend) -> CheckpointStorage:
        """Reads the run spec. `model`: as the task made it.

        Raises:
            BadSpecError: checkpoint.uri or checkpoint.resumeFrom is neither an absolute path nor gs://bucket/path.
        """
        if spec.checkpoint is None:
            return CheckpointStorage(None)
        author = Author(
            uid=spec.job.uid,
            attempt=spec.job.attempt,
            fingerprint=fingerprint(model, spec.entrypoint, spec.seed),
            world=backend.world,
            global_batch=spec.batch.total,
            name=f"{spec.job.namespace}/{spec.job.name}",
            recipe=_describe_recipe(spec),
            code="" if spec.code is None else spec.code.sha256,
        )
        named = spec.checkpoint.resume_from
        target = CheckpointTarget(
            open_store(spec.checkpoint.uri), author, spec.checkpoint.keep, spec.checkpoint.keep_best
        )
        return CheckpointStorage(target, None if named is None else CheckpointSource.at(named))

    def choose(self, backend: Backend, outputs: RunOutputs) -> LoadedCheckpoint | None:
        """Returns the checkpoint to continue from, the same in every process; None if there is none. A collective.

        Raises, in every process:
            CheckpointUnusableError: the job's own checkpoints cannot be continued.
            UserCodeError: the checkpoints there may not be meant for this job, or there is none where one was named.
            StorageError: the storage refuses.
        """
        return None if self.target is None else read_once(backend, outputs.is_reporter, lambda: self._choose(outputs))

    def writers(self, backend: Backend, environment: WorkerEnvironment, outputs: RunOutputs) -> Writers | None:
        """Returns the hosts that write together; None if host 0 writes alone. A collective."""
        if self.target is None:
            return None
        host = environment.host_index if environment.local_rank == 0 else -1
        writers, unable = find_writers(self.target, backend, environment.num_hosts, host, outputs.is_reporter)
        if unable:
            outputs.add_finding(Finding("Checkpoint", 0, _describe_unshared(self.target.store.uri, unable)))
        return writers

    def policy_state(self, checkpoint: LoadedCheckpoint | None) -> Mapping[str, Any] | None:
        """Returns the checkpoint's state of the evaluation policy; None if it is another job's."""
        if checkpoint is None or not self._is_own(checkpoint):
            return None
        state_document: Mapping[str, Any] | None = checkpoint.snapshot.document.get("steering")
        return state_document

    def start(self, checkpoint: LoadedCheckpoint | None, hp: Hyperparameters, spec: RunSpec) -> Start:
        """Returns where the run begins."""
        replicas, attempt = spec.slice.replicas, spec.job.attempt
        if checkpoint is None:
            return fresh_start(hp, replicas, attempt)
        kept, reduction = checkpoint.snapshot.document, reduction_of(self.policy_state(checkpoint), spec)
        ended = self._is_own(checkpoint) and bool(kept.get("ended"))
        return replace(continued_start(kept, hp, replicas, attempt, reduction), ended=ended)

    def _is_own(self, checkpoint: LoadedCheckpoint) -> bool:
        return self.target is not None and self.target.author.may_continue(checkpoint.commit.author)

    def checkpoints(
        self,
        spec: RunSpec,
        work: PreparedTask,
        outputs: RunOutputs,
        writers: Writers | None,
        resumed: bool,
        *,
        together: bool = False,
    ) -> Checkpoints:
        """Returns what the loop calls for checkpoints. The reporting replica leads. `together`: as
        Backend.reads_together."""
        began = work.start.step if resumed else None
        all_take_part = together or writers is not None or work.sharding is not None
        run = LiveState(work.task.model, work.optimizer, work.averaged, work.sharding, together)
        if spec.checkpoint is not None and self.target is not None and not outputs.is_reporter and all_take_part:
            return PartWriter(_schedule(spec.checkpoint, spec), _part_taker(self.target, run, work, writers), began)

        size = length_of(work.task.train, "train") if has_length(work.task.train) else None

        def take(step: int, position: Position, health: NumericalHealth, alone: bool) -> Snapshot:
            record = document(work.start, step, position, work.rates.rate_after(step), work.hp, health)
            record |= {"trainExamples": size, "rates": work.rates.state(), "growth": work.group_changes.state()}
            record |= {"steering": work.policy.state(), "logged": work.logbook.state(), **work.closing.state()}
            if work.gains is not None:
                record["adaScale"] = work.gains.state(step)
            if (plateau := work.schedules.state()) is not None:
                record["plateau"] = plateau
            if work.begun_with is not None:
                record["begunWith"] = work.begun_with
            with user_code("the state of the task's hooks"):
                state = work.hooks.state()
            _, *parts_of_others = [set()] if alone or writers is None else _divide(writers, run, work)
            elsewhere, part = set[Item]().union(*parts_of_others), CheckpointPart(0, 1 + len(parts_of_others))
            return take_snapshot(run, state, step, int(record["examples"]), record, elsewhere, part)

        repeats = work.sharding is None and not together
        return self.checkpoints_of(spec, take, outputs, began, writers, repeats=repeats)

    def checkpoints_of(
        self,
        spec: RunSpec,
        take: Take,
        outputs: RunOutputs,
        resumed: int | None,
        writers: Writers | None = None,
        *,
        repeats: bool = True,
    ) -> Checkpoints:
        """Returns what the loop calls for checkpoints of the snapshots that `take` makes. `resumed`: the step that the
        run continues from, if any. `writers`: the hosts that write a part; None if the reporting replica's host writes
        alone. `repeats`: as for `Checkpointer`."""
        if spec.checkpoint is None or self.target is None:
            return Checkpoints()
        schedule = _schedule(spec.checkpoint, spec)
        if not outputs.is_reporter:
            return Checkpoints(schedule)

        def warn(text: str) -> None:
            outputs.add_finding(Finding("Checkpoint", checkpointer.last_step or 0, text))

        def found_best(best: Best) -> None:
            outputs.progress.best = best
            outputs.progress.say(f"the best checkpoint is {best}")

        def peer_parts(snapshot: Snapshot) -> PeerParts:
            return PeerParts() if writers is None or snapshot.part == WHOLE else writers.channel(snapshot.part.count)

        checkpointer = Checkpointer(
            self.target,
            schedule,
            take,
            warn,
            resumed=resumed,
            found_best=found_best,
            peer_parts=peer_parts,
            repeats=repeats,
            rungs=spec.checkpoint.rungs,
        )
        checkpointer.best = best_in(self.target)
        if checkpointer.best is not None:
            found_best(checkpointer.best)
        return checkpointer

    def _choose(self, outputs: RunOutputs) -> LoadedCheckpoint | None:
        assert self.target is not None
        author, say = self.target.author, outputs.progress.say

        def warn(text: str) -> None:
            outputs.add_finding(Finding("Checkpoint", 0, text))

        with mark_reading(self.target):
            checkpoint = choose_own(self.target.store, author, self.source, say, warn)
            if checkpoint is None and self.source is not None:
                checkpoint = choose_named(self.source, author, say, warn)
        prepare(self.target)
        return checkpoint


def _schedule(checkpoint: CheckpointSpec, spec: RunSpec) -> CheckpointSchedule:
    return CheckpointSchedule(checkpoint.every_steps, checkpoint.every_seconds, spec.last_step)


def _describe_unshared(uri: str, unable: Sequence[int]) -> str:
    return (
        f"{'hosts' if unable[1:] else 'host'} {ranges(unable)} cannot read and write what host 0 keeps in {uri}, so "
        "host 0 writes whole checkpoints alone. If that is a directory of host 0 only, an attempt on another machine "
        "will not find them: checkpoint.uri should be storage that all hosts share"
    )


def _part_taker(
    target: CheckpointTarget, run: LiveState, work: PreparedTask, writers: Writers | None
) -> Callable[[int], Callable[[], None] | None]:
    """Returns the `take` of a `PartWriter`, for a process that does not lead. A process that writes no part may still
    hold a part of the optimizer's state, or have to read what the leader reads."""

    def take(step: int) -> Callable[[], None] | None:
        state: Mapping[str, Any] = {}
        if run.together:
            with user_code("the state of the task's hooks"):
                state = work.hooks.state()
        parts = [set[Item]()] if writers is None else _divide(writers, run, work)
        number = 0 if writers is None else writers.host
        # Host 0's part is the leader's. Empty parts are sent, too: there may be more parts than tensors.
        writes = 0 < number < len(parts)
        tensors = take_part(run, state, parts[number] if writes else ())
        if writers is None or not writes:
            return None
        folder = Folder(step, target.author.job, target.author.attempt)
        part, channel = CheckpointPart(number, len(parts)), writers.channel(len(parts))
        return partial(write_part, target, folder, tensors, part, channel, number)

    return take


def _divide(writers: Writers, run: LiveState, work: PreparedTask) -> list[set[Item]]:
    # The groups' names, since their order numbers the optimizer's state.
    return writers.divide(replicated_tensors(run), work.group_changes.state()["names"])


def _describe_recipe(spec: RunSpec) -> dict[str, str]:
    """Returns what the user wrote, by field path. The run spec holds the parameters and the data outside the recipe."""
    parameters = {f"recipe.parameters.{name}": value for name, value in spec.parameters.items()}
    data = {} if spec.data_uri is None else {"data.uri": spec.data_uri}
    begins = None if spec.checkpoint is None else spec.checkpoint.init_from
    weights = {} if begins is None else {"checkpoint.initFrom.uri": begins.uri}
    return {**spec.recipe, **parameters, **data, **weights}


def describe_nothing_left(start: Start, checkpoint: LoadedCheckpoint | None, hp: Hyperparameters) -> str | None:
    """Describes a run that has no steps left, or whose training had ended; None if it trains."""
    if checkpoint is None or (start.step < hp.last_step and not start.ended):
        return None
    return (
        f"nothing left to train: checkpoint {checkpoint.folder} of job {checkpoint.commit.author} is at step "
        f"{start.step} of {hp.train_steps}"
    )


def report_origin(
    start: Start, checkpoint: LoadedCheckpoint, me: Author, hp: Hyperparameters, outputs: RunOutputs
) -> None:
    """Reports what the run continues from, as a warning if the user may not expect it. `me`: this job.

    Raises:
        UserCodeError: checkpoint.resumeFrom names another job's checkpoint, and no steps are left to train.
    """
    author, done = checkpoint.commit.author, describe_nothing_left(start, checkpoint, hp)
    named = not me.may_continue(author)
    if done is not None and named:
        raise UserCodeError(f"checkpoint.resumeFrom: {done}; raise recipe.trainSteps to train on")
    line = done or _describe_resumption(start, checkpoint, hp)
    outputs.progress.resume(start.step, line)
    if author.code != me.code:
        outputs.add_finding(Finding("Checkpoint", start.step, _describe_other_code(checkpoint, me)))
    if done is not None or not (named or me.uid == author.uid):
        outputs.add_finding(Finding("Checkpoint", start.step, line))


def _describe_other_code(checkpoint: LoadedCheckpoint, me: Author) -> str:
    there, here = (
        f"with sha256 {author.code}" if author.code else "of the image" for author in (checkpoint.commit.author, me)
    )
    return f"checkpoint {checkpoint.folder} was made by other code: the code {there}, this job runs the code {here}"


def _describe_resumption(start: Start, checkpoint: LoadedCheckpoint, hp: Hyperparameters) -> str:
    line = (
        f"continues from checkpoint {checkpoint.folder} of job {checkpoint.commit.author}, with step "
        f"{start.step + 1} of {hp.train_steps}"
    )
    if start.gained is not None:
        return f"{line} at the most: the gains of AdaScale add up to {start.gained.steps:.0f}"
    if checkpoint.commit.author.global_batch == hp.global_batch_size:
        return line
    left = (hp.train_steps - start.step) * hp.global_batch_size
    ramp = ""
    if start.ramp:
        steps = "1 step" if start.ramp.steps == 1 else f"{start.ramp.steps} steps"
        ramp = f"; the learning rate is reached over {steps}"
    return (
        f"{line}: {start.examples} examples were seen with a global batch of "
        f"{checkpoint.commit.author.global_batch}, the {left} that are left are trained with one of "
        f"{hp.global_batch_size}{ramp}"
    )
