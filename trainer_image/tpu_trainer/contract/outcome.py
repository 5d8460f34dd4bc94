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

from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.contract.protocol import ENV_TERMINATION_LOG, TERMINATION_MESSAGE_LIMIT, ExitCode

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
    """`step`, `metrics` and `examples_per_second` as far as the run got. `best`: the best checkpoint, as JSON; `rung`:
    what a rung of a ladder has measured; `places`: where the job's buckets are; `compiled`: what the compiler says of
    the step, for the job's slice and each alternative."""

    code: ExitCode
    message: str
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples_per_second: float | None = None
    best: Mapping[str, Any] | None = None
    rung: Mapping[str, Any] | None = None
    places: Mapping[str, Any] | None = None
    compiled: Sequence[Mapping[str, Any]] = ()

    @property
    def well(self) -> bool:
        """Nothing failed: the run is done, or was stopped as asked."""
        return self.code in (ExitCode.Succeeded, ExitCode.Preempted)


def outcome_of(error: Exception, step: int | None = None) -> Outcome:
    """The outcome of a failure; its message is one line, or a traceback if the user's code or the trainer raised."""
    if not isinstance(error, TrainerError):
        return Outcome(ExitCode.InternalError, _traceback(error), step)
    raised = error.__cause__ if error.code is ExitCode.UserError else None
    step = step if error.step is None else error.step
    return Outcome(error.code, _traceback(raised) if raised else str(error), step)


# Of several failures on a host, the one that says most comes first: a lost peer is how the others see a failure
# elsewhere.
_TELLING = (
    ExitCode.UserError,
    ExitCode.BadSpec,
    ExitCode.NotFinite,
    ExitCode.Diverged,
    ExitCode.CheckpointUnusable,
    ExitCode.StorageDenied,
    ExitCode.StorageFailed,
    ExitCode.Hung,
    ExitCode.InternalError,
    ExitCode.PeerLost,
    ExitCode.Preempted,
    ExitCode.Succeeded,
)


def is_more_specific(name: str | None, code: ExitCode) -> bool:
    """Whether a termination message with the outcome `name` says more than one with `code`. Of two equal failures the
    earlier one does; `name` is None if there is no message."""
    places = {one.name: place for place, one in enumerate(_TELLING)}
    if name not in places:
        return False
    ended_well = code in (ExitCode.Succeeded, ExitCode.Preempted)
    return places[name] < places[code.name] or (name == code.name and not ended_well)


def host_outcome(outcomes: Sequence[Outcome], died: bool) -> Outcome:
    """One outcome for the host's replicas; `died`: at least one process ended before its time."""
    failures = [outcome for outcome in outcomes if not outcome.well]
    if failures or (outcomes and not died):
        return min(failures or outcomes, key=lambda outcome: _TELLING.index(outcome.code))
    return Outcome(ExitCode.InternalError, "a replica's process ended without a word: killed, or crashed natively")


def write_last_words(outcome: Outcome, *, first: bool, path: str | None = None) -> None:
    """Writes the host's termination message, unless another process of this host has left more outputs words.

    `first`: the host's first process, whose loss and metrics are the ones that are reported. `path`: the file, by
    default the one that the environment names, if it does.
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
        said = _outcome_name(file.read())
        if is_more_specific(said, outcome.code) or (said == outcome.code.name and not first):
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
    """At most TERMINATION_MESSAGE_LIMIT bytes of valid JSON.

    A message that is too long loses its beginning, because a traceback says what happened in its last lines.
    Alternatives and metrics are dropped, last ones first, only if without words they would fill half of it; the message
    says how many metrics.
    """
    # A lone surrogate (an undecodable file name in a traceback) has no UTF-8 form.
    message = outcome.message.encode("utf-8", "replace").decode()
    metrics = list(outcome.metrics)
    while len(_encode(outcome, "")) > TERMINATION_MESSAGE_LIMIT // 2 and (less := _less(outcome)) is not None:
        outcome = less
    message += _without(metrics[len(outcome.metrics) :])
    whole = _encode(outcome, message)
    if len(whole) <= TERMINATION_MESSAGE_LIMIT:
        return whole
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
    """JSON has no NaN and no infinity: a diverged loss is written as null."""
    return value if value is not None and math.isfinite(value) else None


def _without(dropped: Sequence[str]) -> str:
    """Returns what the message says of metrics that it has no room for."""
    if not dropped:
        return ""
    names = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in dropped[:_SHOWN]]
    more = f" and {len(dropped) - _SHOWN} more" if dropped[_SHOWN:] else ""
    which = "metric has" if len(dropped) == 1 else "metrics have"
    return f"; {len(dropped)} {which} no room here, with shorter names they would: {', '.join(names)}{more}"


def _tail(message: str, characters: int) -> str:
    return _CUT + message[len(message) - characters :]


def _less(outcome: Outcome) -> Outcome | None:
    """The outcome without the last of its alternatives, or else of its metrics; None if it has neither."""
    # The job's own slice comes first.
    if len(outcome.compiled) > 1:
        return replace(outcome, compiled=outcome.compiled[:-1])
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
    if outcome.rung is not None:
        document["rung"] = outcome.rung
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
