"""Decides after every step whether a checkpoint is due, and has it written while the training continues.

One replica leads: all replicas hold the same state, so it could write everything, and it commits. One replica on each
other host may write a part. A checkpoint that is due by steps is due in all replicas at once. The leader's clock alone
decides whether one is due by time, and the leader asks the others through the signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread

from tpu_trainer.checkpoint.best import best_in, note_evaluation
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, PeerParts, make_room, remove_rungs, write
from tpu_trainer.checkpoint.commit import Evaluation
from tpu_trainer.checkpoint.snapshot import Snapshot
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.contract.outcome import Best
from tpu_trainer.data.order import Position

WORTH_SAYING = 1.0
"""Seconds of waiting for the previous checkpoint that are worth a line."""


@dataclass(frozen=True)
class CheckpointSchedule:
    """When checkpoints are due: every few steps, every few seconds, or both; always after `last_step`, the run's
    end."""

    every_steps: int | None
    every_seconds: int | None
    last_step: int

    def by_step(self, step: int) -> bool:
        return step == self.last_step or (self.every_steps is not None and step % self.every_steps == 0)

    def by_time(self, seconds_since: float) -> bool:
        """Returns whether a checkpoint is due. `seconds_since`: since the last snapshot, or since the start."""
        return self.every_seconds is not None and seconds_since >= self.every_seconds


@dataclass(frozen=True)
class CheckpointCost:
    """What checkpoints have cost. blocked: seconds in which the training waited for a write or a copy. size: bytes."""

    blocked: float = 0.0
    size: int = 0
    commits: int = 0


@dataclass(frozen=True)
class WriteResult:
    """How one write ended. failure: None if it is committed. complaint: what else went wrong, such as a deletion. best:
    the best checkpoint after it, with checkpoint.keepBest."""

    step: int
    size: int = 0
    best: Best | None = None
    failure: str | None = None
    complaint: str | None = None


class Checkpoints:
    """What the loop calls. The methods of this base class write nothing: for runs without checkpoints, and for replicas
    that do not write them. `due`: None in a run without checkpoint.uri.

    last_step: the newest step that is committed, as far as this run knows. closes: the training has made its last step,
    whose checkpoint may be written a second time; until `close`, older ones stay.
    """

    def __init__(self, due: CheckpointSchedule | None = None) -> None:
        self._due = due
        self.closes = False
        self.last_step: int | None = None
        self.cost = CheckpointCost()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after this step; the same in every replica."""
        return self._due is not None and self._due.by_step(step)

    def overdue(self) -> bool:
        """Returns whether a checkpoint is due by this replica's clock. Call it in every step."""
        return False

    def note_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Adds the evaluation after `step` to the checkpoint of that step, if there is one now or later."""

    def save(self, step: int, position: Position, health: NumericalHealth) -> None:
        """Takes a snapshot, and has it written while the training continues."""

    def save_now(self, step: int, position: Position, health: NumericalHealth) -> int | None:
        """Writes a checkpoint of a run that is being stopped; returns `step` once it is committed, None if it
        failed."""
        return None

    def finish(self) -> bool:
        """Waits for the current write. Returns whether the newest snapshot is committed (or there was none)."""
        return True

    def close(self) -> None:
        """Deletes checkpoints beyond checkpoint.keep. The last one is committed and not written again."""

    def tidy(self) -> None:
        """Deletes what only an unfinished training needs. The whole training has succeeded."""


class PartWriter(Checkpoints):
    """Writes a part of each checkpoint, in a process that does not lead. Takes part in each step's checkpoint once.

    take: copies this process's part of a step's checkpoint, in the training's thread, and returns a function that
    writes it, None if there is no part. resumed: the step of the checkpoint that the run continues from.
    """

    def __init__(
        self, due: CheckpointSchedule, take: Callable[[int], Callable[[], None] | None], resumed: int | None = None
    ) -> None:
        super().__init__(due)
        self._take, self._newest = take, resumed
        self._writing: Thread | None = None

    def save(self, step: int, position: Position, health: NumericalHealth) -> None:
        self.finish()
        self._newest = step
        if (part := self._take(step)) is not None:
            self._writing = Thread(target=part, name="checkpoint", daemon=True)
            self._writing.start()

    def save_now(self, step: int, position: Position, health: NumericalHealth) -> int | None:
        # If the write has failed, the leader alone repeats it.
        if self._newest != step:
            self.save(step, position, health)
        self.finish()
        return None

    def finish(self) -> bool:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        return True


class Checkpointer(Checkpoints):
    """Writes checkpoints, in the process that leads.

    take: makes the snapshot of a step, whole or as one of several parts. say: receives each message. found_best:
    receives each new best checkpoint. The training's thread makes these calls. resumed: the step of the checkpoint that
    the run continues from. peer_parts: returns the parts that other hosts write of a snapshot. repeats: this process
    alone can take a step's snapshot a second time. rungs: as in `CheckpointSpec`.
    """

    def __init__(
        self,
        target: CheckpointTarget,
        due: CheckpointSchedule,
        take: Callable[[int, Position, NumericalHealth, bool], Snapshot],
        say: Callable[[str], None],
        resumed: int | None = None,
        now: Callable[[], float] = time.monotonic,
        found_best: Callable[[Best], None] = lambda best: None,
        peer_parts: Callable[[Snapshot], PeerParts] = lambda _: PeerParts(),
        repeats: bool = True,
        rungs: str | None = None,
    ) -> None:
        super().__init__(due)
        self._rungs = rungs
        self._target, self._when, self._take, self._say, self._now = target, due, take, say, now
        self._peer_parts, self._repeats = peer_parts, repeats
        self._writing: Thread | None = None
        self._results: list[WriteResult] = []
        self.last_step = self._newest = resumed
        self._before: int | None = None
        self._since = now()
        self._found_best = found_best
        self.best: Best | None = None
        self._taken: int | None = None
        self._evaluation: tuple[int, Evaluation] | None = None

    def overdue(self) -> bool:
        if self._writing is not None and not self._writing.is_alive():
            self._wait()
        return self._when.by_time(self._now() - self._since)

    def note_evaluation(self, step: int, evaluation: Evaluation) -> None:
        if self._target.best is None:
            return
        self._evaluation = (step, evaluation)
        if self._taken != step:
            return
        self._wait()
        if self.last_step == step:
            try:
                note_evaluation(self._target, step, evaluation)
                best = best_in(self._target)
                self._note_best(best)
                # The checkpoint that was the best until now may be superfluous.
                if not self.closes:
                    make_room(self._target, step, best)
            except StorageError as error:
                self._say(f"the evaluation of step {step} was not noted with its checkpoint: {error}")

    def save_now(self, step: int, position: Position, health: NumericalHealth) -> int | None:
        # A checkpoint of this step may have been due anyway. If its write failed, this is a second attempt, in which no
        # other host takes part.
        again = self._newest == step
        self.finish()
        if self.last_step != step and (self._repeats or not again):
            self.save(step, position, health, alone=again)
            self.finish()
        return step if self.last_step == step else None

    def finish(self) -> bool:
        self._wait()
        return self.last_step == self._newest

    def close(self) -> None:
        if not self.closes or self.last_step is None:
            return
        try:
            make_room(self._target, self.last_step, self.best)
        except StorageError as error:
            self._say(f"after the checkpoint of step {self.last_step} old ones were not deleted: {error}")

    def tidy(self) -> None:
        if self._rungs is None:
            return
        try:
            remove_rungs(self._rungs)
        except StorageError as error:
            self._say(f"what the lower rungs of the ladder have left in {self._rungs}* stays there: {error}")

    def save(self, step: int, position: Position, health: NumericalHealth, *, alone: bool = False) -> None:
        # The previous write ends first: two snapshots at once would take more host memory than was planned for.
        begun = self._now()
        previous = self._wait()
        waited = self._now() - begun
        if previous is not None and waited >= WORTH_SAYING:
            self._say(
                f"step {step}: training stood still for {waited:.1f} s until the checkpoint of step {previous.step} "
                "was written: checkpoints are due faster than this storage takes them"
            )
        snapshot = self._take(step, position, health, alone)
        peer_parts = self._peer_parts(snapshot)
        self._taken = self._newest = step
        self._since = self._now()
        self.cost = CheckpointCost(self.cost.blocked + self._since - begun, self.cost.size, self.cost.commits)
        evaluation = self._evaluation[1] if self._evaluation is not None and self._evaluation[0] == step else None
        target, keeps_all = self._target, self.closes
        # A daemon, so that storage that never answers does not keep the process from ending.
        self._writing = Thread(
            target=lambda: self._results.append(_write_checkpoint(target, snapshot, evaluation, peer_parts, keeps_all)),
            name="checkpoint",
            daemon=True,
        )
        self._writing.start()

    def _wait(self) -> WriteResult | None:
        """Waits for the current write, if there is one, and evaluates its result."""
        if self._writing is None:
            return None
        # Joined, because a thread that still frees its tensors while the interpreter exits aborts the process.
        self._writing.join()
        result, self._writing = self._results.pop(), None
        if result.failure is not None:
            if self.last_step == result.step:
                # Writing it a second time begins with the deletion of the first COMMIT.
                self.last_step = self._before
            newest = "there is none" if self.last_step is None else f"the newest is of step {self.last_step}"
            self._say(f"the checkpoint of step {result.step} was not written, {newest}: {result.failure}")
            return result
        if self.last_step != result.step:
            self._before, self.last_step = self.last_step, result.step
        self.cost = CheckpointCost(self.cost.blocked, self.cost.size + result.size, self.cost.commits + 1)
        self._note_best(result.best)
        if result.complaint is not None:
            self._say(f"after the checkpoint of step {result.step} old ones were not deleted: {result.complaint}")
        return result

    def _note_best(self, best: Best | None) -> None:
        if best is not None and best != self.best:
            self.best = best
            self._found_best(best)


def _write_checkpoint(
    target: CheckpointTarget, snapshot: Snapshot, evaluation: Evaluation | None, peer_parts: PeerParts, keeps_all: bool
) -> WriteResult:
    """Writes a checkpoint and deletes old ones, unless it `keeps_all`. Runs in a separate thread, and never raises."""
    size, best = 0, None
    try:
        size = write(target, snapshot, evaluation, peer_parts)
        best = best_in(target)
        if not keeps_all:
            make_room(target, snapshot.step, best)
    except Exception as error:
        text = str(error)
        if not isinstance(error, StorageError):
            text = f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"
        # A checkpoint with a size is committed.
        return (
            WriteResult(snapshot.step, size, best, complaint=text) if size else WriteResult(snapshot.step, failure=text)
        )
    return WriteResult(snapshot.step, size, best)
