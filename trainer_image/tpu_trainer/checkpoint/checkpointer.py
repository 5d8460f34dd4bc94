"""Decides after every step whether a checkpoint is due, and has it written. The loop holds one of these.

Only one replica writes: data-parallel replicas all hold the same state. The others have a `NoCheckpoints`, which writes
nothing, but knows after which steps one is due: there all of them compare their parameters first. That minutes have
passed, only the writer's clock decides, and it asks the others through the signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tpu_trainer.checkpoint import writing
from tpu_trainer.checkpoint.background import Background, Result
from tpu_trainer.checkpoint.snapshot import Snapshot
from tpu_trainer.data import Position
from tpu_trainer.doctor.finite import Health

WORTH_SAYING = 1.0
"""Seconds of waiting for the checkpoint before that a person is told about."""


@dataclass(frozen=True)
class Due:
    """When checkpoints are due: every so many steps, minutes, or both; always after `last_step`, the run's end."""

    every_steps: int | None
    every_minutes: int | None
    last_step: int

    def by_step(self, step: int) -> bool:
        return step == self.last_step or (self.every_steps is not None and step % self.every_steps == 0)

    def by_time(self, seconds_since: float) -> bool:
        """`seconds_since`: seconds since the last snapshot, or since the start."""
        return self.every_minutes is not None and seconds_since >= 60 * self.every_minutes


@dataclass(frozen=True)
class Cost:
    """What checkpoints have cost so far. blocked: seconds that training stood still for them, waiting and copying;
    written: seconds of writing beside the training; size: bytes committed; commits: how many."""

    blocked: float = 0.0
    written: float = 0.0
    size: int = 0
    commits: int = 0


class Checkpoints(Protocol):
    """What the loop calls. last_step: the newest step that this run knows to be committed."""

    last_step: int | None
    cost: Cost

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step; the same in every replica."""

    def overdue(self) -> bool:
        """Called in every step: whether one is due for the time that has passed, by this replica's clock."""

    def save(self, step: int, position: Position, health: Health) -> None:
        """Takes a snapshot, and has it written while training goes on."""

    def save_now(self, step: int, position: Position, health: Health) -> int | None:
        """The run is being stopped: returns `step` once a checkpoint of it is committed, None if that failed."""

    def finish(self) -> bool:
        """Waits for what is being written. Whether the newest snapshot is committed (or there was none)."""


class NoCheckpoints:
    """For replicas that write none, and for runs without a checkpoint.uri."""

    last_step: int | None = None
    cost = Cost()

    def __init__(self, due: Due | None = None) -> None:
        """`due`: None where no replica writes any."""
        self._due = due

    def due(self, step: int) -> bool:
        return self._due is not None and self._due.by_step(step)

    def overdue(self) -> bool:
        return False

    def save(self, step: int, position: Position, health: Health) -> None: ...

    def save_now(self, step: int, position: Position, health: Health) -> int | None:
        return None

    def finish(self) -> bool:
        return True


class Checkpointer:
    """take: makes the snapshot of a step, in the training's thread. say: takes each message for people, in the same
    thread. resumed: the step of the checkpoint that the run continues from."""

    def __init__(
        self,
        target: writing.Target,
        due: Due,
        take: Callable[[int, Position, Health], Snapshot],
        say: Callable[[str], None],
        resumed: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._due, self._take, self._say, self._now = due, take, say, now
        self._background = Background(
            lambda snapshot: writing.write(target, snapshot), lambda step: writing.make_room(target, step)
        )
        self.last_step = resumed
        self.cost = Cost()
        self._newest = resumed
        self._since = now()

    def due(self, step: int) -> bool:
        return self._due.by_step(step)

    def overdue(self) -> bool:
        self._learn(self._background.poll())
        return self._due.by_time(self._now() - self._since)

    def save_now(self, step: int, position: Position, health: Health) -> int | None:
        # It may be the very step that was due by itself; where that write failed, this is another try.
        self.finish()
        if self.last_step != step:
            self.save(step, position, health)
            self.finish()
        return step if self.last_step == step else None

    def finish(self) -> bool:
        self._wait()
        return self.last_step == self._newest

    def save(self, step: int, position: Position, health: Health) -> None:
        # First the one before: two snapshots at once would be more host memory than anybody planned for.
        begun = self._now()
        waited_for = self._wait()
        waited = self._now() - begun
        if waited_for is not None and waited >= WORTH_SAYING:
            self._say(
                f"step {step}: training stood still for {waited:.1f} s until the checkpoint of step {waited_for} was "
                "written: checkpoints are due faster than this storage takes them"
            )
        snapshot = self._take(step, position, health)
        self._newest, self._since = step, self._now()
        self._add(blocked=self._since - begun)
        self._background.start(snapshot)

    def _wait(self) -> int | None:
        """The step whose write was waited for."""
        result = self._background.wait()
        self._learn(result)
        return None if result is None else result.step

    def _learn(self, result: Result | None) -> None:
        if result is None:
            return
        if result.failure is not None:
            newest = "there is none" if self.last_step is None else f"the newest is of step {self.last_step}"
            self._say(f"the checkpoint of step {result.step} was not written, {newest}: {result.failure}")
            return
        self.last_step = result.step
        self._add(written=result.seconds, size=result.size, commits=1)
        if result.complaint is not None:
            self._say(f"after the checkpoint of step {result.step} old ones were not deleted: {result.complaint}")

    def _add(self, blocked: float = 0.0, written: float = 0.0, size: int = 0, commits: int = 0) -> None:
        was = self.cost
        self.cost = Cost(was.blocked + blocked, was.written + written, was.size + size, was.commits + commits)
