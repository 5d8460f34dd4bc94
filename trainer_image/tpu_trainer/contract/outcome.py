"""How a worker ended: its exit code, its last log line, and the JSON that the kubelet copies into the pod's status."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpu_contract.protocol import ENV_TERMINATION_LOG, TERMINATION_MESSAGE_LIMIT, ExitCode
from tpu_contract.slice_check import line_to_json
from tpu_contract.words import cut, several
from tpu_trainer.contract.errors import SliceUnfitError, TrainerError

_CUT = "... "
_SHOWN, _LONGEST_NAME = 3, 60


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best evaluation: its folder's name, its step, and the value of the metric."""

    name: str
    step: int
    metric: str
    value: float

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "step": self.step, "metric": self.metric, "value": self.value}

    def __str__(self) -> str:
        return f"{self.name}, with {self.metric} {self.value:.6g}"


@dataclass(frozen=True)
class Outcome:
    """How a worker ended. `step`, `metrics`, `examples_per_second`: as far as the run got. `best`: the best checkpoint,
    as JSON; `rung`: what a rung of a ladder measured; `places`: where the job's buckets are; `compiled`: the compile
    check's answer; `slice_check`: the line of the slice check that this host failed; `checkpoint_step`: the newest step
    that is safe in a checkpoint."""

    code: ExitCode
    message: str
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples_per_second: float | None = None
    best: Mapping[str, Any] | None = None
    rung: Mapping[str, Any] | None = None
    places: Mapping[str, Any] | None = None
    compiled: Mapping[str, Any] | None = None
    slice_check: Mapping[str, Any] | None = None
    checkpoint_step: int | None = None

    @property
    def ended_well(self) -> bool:
        """Whether nothing failed: the run is done, or was stopped on request."""
        return self.code in (ExitCode.Succeeded, ExitCode.Preempted)


def outcome_of(error: Exception, step: int | None = None) -> Outcome:
    """Returns the outcome of a failure; its message is one line, or a traceback if user code or a trainer bug
    raised."""
    if not isinstance(error, TrainerError):
        return Outcome(ExitCode.InternalError, _traceback(error), step)
    line = line_to_json(error.line) if isinstance(error, SliceUnfitError) else None
    raised = error.__cause__ if error.code is ExitCode.UserError else None
    step = step if error.step is None else error.step
    return Outcome(error.code, _traceback(raised) if raised else str(error), step, slice_check=line)


# The most specific first: of several failures on a host it is reported. A lost peer only reflects a failure elsewhere.
_MOST_SPECIFIC_FIRST = (
    ExitCode.UserError,
    ExitCode.BadSpec,
    ExitCode.NotFinite,
    ExitCode.Diverged,
    ExitCode.CheckpointUnusable,
    ExitCode.SliceUnfit,
    ExitCode.StorageDenied,
    ExitCode.StorageFailed,
    ExitCode.Hung,
    ExitCode.InternalError,
    ExitCode.PeerLost,
    ExitCode.Preempted,
    ExitCode.Succeeded,
)


def is_more_specific(name: str | None, code: ExitCode) -> bool:
    """Returns whether a termination message with the outcome `name` is worth more than one with `code`; `name` is None
    without a message. Of two equal failures the earlier one is worth more."""
    places = {member.name: place for place, member in enumerate(_MOST_SPECIFIC_FIRST)}
    if name not in places:
        return False
    ended_well = code in (ExitCode.Succeeded, ExitCode.Preempted)
    return places[name] < places[code.name] or (name == code.name and not ended_well)


def host_outcome(outcomes: Sequence[Outcome], died: bool) -> Outcome:
    """Returns one outcome for the host's replicas; `died`: at least one process ended without an outcome."""
    failures = [outcome for outcome in outcomes if not outcome.ended_well]
    if failures or (outcomes and not died):
        return min(failures or outcomes, key=lambda outcome: _MOST_SPECIFIC_FIRST.index(outcome.code))
    return Outcome(
        ExitCode.InternalError,
        "a replica's process ended without reporting why: it was killed, or crashed in native code",
    )


def write_last_words(outcome: Outcome, *, first: bool, path: str | None = None) -> None:
    """Writes the host's termination message, unless another process of this host has written a more specific one.

    `first`: this is the host's first process, whose loss and metrics are reported. `path`: the file; by default the one
    that the environment names, if any.
    """
    path = path or os.environ.get(ENV_TERMINATION_LOG)
    if not path:
        return
    try:
        _write(Path(path), outcome, first)
    except OSError as error:
        print(f"{ENV_TERMINATION_LOG} {path}: cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _write(path: Path, outcome: Outcome, first: bool) -> None:
    # In place and under a lock: in a pod the path is a mounted file, and all processes of the host share it.
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        written = _outcome_name(file.read())
        if is_more_specific(written, outcome.code) or (written == outcome.code.name and not first):
            return
        file.truncate(0)
        file.write(termination_message(outcome))


def _outcome_name(message: bytes) -> str | None:
    try:
        document = json.loads(message)
    except ValueError:
        return None
    return document.get("outcome") if isinstance(document, dict) else None


def termination_message(outcome: Outcome) -> bytes:
    """Encodes the outcome as at most TERMINATION_MESSAGE_LIMIT bytes of valid JSON.

    A text that is too long loses its beginning, because the last lines of a traceback matter most. Metrics are dropped,
    last ones first, only if everything but the text would fill more than half of the message; the text then names
    them.
    """
    # A lone surrogate (an undecodable file name in a traceback) has no UTF-8 form.
    message = outcome.message.encode("utf-8", "replace").decode()
    metrics = list(outcome.metrics)
    while len(_encode(outcome, "")) > TERMINATION_MESSAGE_LIMIT // 2 and (shorter := _drop_last(outcome)) is not None:
        outcome = shorter
    message += _describe_dropped(metrics[len(outcome.metrics) :])
    encoded = _encode(outcome, message)
    if len(encoded) <= TERMINATION_MESSAGE_LIMIT:
        return encoded
    # Bisection over characters, since escapes and UTF-8 make bytes per character uneven.
    fits, too_long = 0, len(message)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(_encode(outcome, _tail(message, middle))) <= TERMINATION_MESSAGE_LIMIT:
            fits = middle
        else:
            too_long = middle
    return _encode(outcome, _tail(message, fits))


def finite(value: float | None) -> float | None:
    """Returns the value, or None if it is not finite: JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _describe_dropped(dropped: Sequence[str]) -> str:
    if not dropped:
        return ""
    names = several([cut(name, _LONGEST_NAME) for name in dropped], _SHOWN)
    which = "metric has" if len(dropped) == 1 else "metrics have"
    return f"; {len(dropped)} {which} no room here, and would with shorter names: {names}"


def _tail(message: str, characters: int) -> str:
    return _CUT + message[len(message) - characters :]


def _drop_last(outcome: Outcome) -> Outcome | None:
    """Returns the outcome without its last metric; None if it has none."""
    if not outcome.metrics:
        return None
    *names, dropped = outcome.metrics
    rung = outcome.rung
    if rung is not None:
        rung = {**rung, "evaluated": [name for name in rung["evaluated"] if name != dropped]}
    return replace(outcome, metrics={name: outcome.metrics[name] for name in names}, rung=rung)


def _encode(outcome: Outcome, message: str) -> bytes:
    document: dict[str, Any] = {"outcome": outcome.code.name, "message": message}
    if outcome.step is not None:
        document["step"] = outcome.step
    if outcome.checkpoint_step is not None:
        document["checkpointStep"] = outcome.checkpoint_step
    if outcome.metrics:
        document["metrics"] = {name: finite(value) for name, value in outcome.metrics.items()}
    if outcome.examples_per_second is not None:
        document["examplesPerSecond"] = round(outcome.examples_per_second, 3)
    if outcome.best is not None:
        document["bestCheckpoint"] = outcome.best
    if outcome.places:
        document["places"] = outcome.places
    if outcome.compiled:
        document["compiled"] = outcome.compiled
    if outcome.slice_check:
        document["sliceCheck"] = outcome.slice_check
    if outcome.rung is not None:
        document["rung"] = outcome.rung
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
