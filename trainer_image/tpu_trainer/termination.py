"""The last word of a worker: the JSON that the kubelet copies into the pod's status. Written by `entry`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_trainer.contract import TERMINATION_MESSAGE_LIMIT
from tpu_trainer.outcome import Outcome

_CUT = "... "


def write_termination(path: Path, outcome: Outcome) -> None:
    """Writes in place: in a pod the path is a mounted file, which cannot be replaced by a rename."""
    path.write_bytes(termination_message(outcome))


def termination_message(outcome: Outcome) -> bytes:
    """At most TERMINATION_MESSAGE_LIMIT bytes of valid JSON.

    A message that is too long loses its beginning, because a traceback says what happened in its last lines.
    Metrics are dropped, last ones first, only where they alone would fill the message.
    """
    # A lone surrogate (an undecodable file name in a traceback) has no UTF-8 form.
    message = outcome.message.encode("utf-8", "replace").decode()
    metrics = dict(outcome.metrics)
    while metrics and len(_encode(outcome, "", metrics)) > TERMINATION_MESSAGE_LIMIT // 2:
        metrics.popitem()
    whole = _encode(outcome, message, metrics)
    if len(whole) <= TERMINATION_MESSAGE_LIMIT:
        return whole
    # Bisection over characters, since escapes and UTF-8 make bytes per character uneven.
    fits, too_long = 0, len(message)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(_encode(outcome, _tail(message, middle), metrics)) <= TERMINATION_MESSAGE_LIMIT:
            fits = middle
        else:
            too_long = middle
    return _encode(outcome, _tail(message, fits), metrics)


def finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: a diverged loss is written as null."""
    return value if value is not None and math.isfinite(value) else None


def _tail(message: str, characters: int) -> str:
    return _CUT + message[len(message) - characters :]


def _encode(outcome: Outcome, message: str, metrics: Mapping[str, float]) -> bytes:
    document: dict[str, Any] = {"outcome": outcome.code.name, "message": message}
    if outcome.step is not None:
        document["step"] = outcome.step
    if metrics:
        document["metrics"] = {name: finite(value) for name, value in metrics.items()}
    if outcome.examples_per_second is not None:
        document["examplesPerSecond"] = round(outcome.examples_per_second, 3)
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
