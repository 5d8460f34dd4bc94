"""What worker 0 said about the training when it ended, from its termination message. Called by the planner.

A loop of the user's own may write anything there, and nothing in it may keep a finished job from being Succeeded.
"""

import json
import math
from itertools import islice
from typing import Any

from tpu_training_operator.api.status import MOST_METRICS, Progress
from tpu_training_operator.domain.observed import WorkerPod

# As in the recipe: what a double holds exactly.
_LARGEST_STEP = 2**53


def final_progress(leader: WorkerPod, total_steps: int) -> Progress | None:
    """Step, speed and metrics at the end; None where the worker ran a loop that reports none."""
    try:
        message = json.loads(str(leader.termination.get("message") or ""))
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not _is_step(message.get("step")):
        return None
    metrics = _metrics(message.get("metrics"))
    return Progress(
        step=message["step"],
        total_steps=total_steps,
        examples_per_second=_number(message.get("examplesPerSecond")),
        loss=metrics.get("loss"),
        metrics=metrics,
    )


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_STEP


def _metrics(given: Any) -> dict[str, str]:
    """The numbers among them, as many as the status has room for."""
    if not isinstance(given, dict):
        return {}
    texts = ((name, _number(value)) for name, value in given.items())
    return dict(islice(((name, text) for name, text in texts if text is not None), MOST_METRICS))


def _number(value: Any) -> str | None:
    """A finite or infinite number as text, to six digits; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    except OverflowError:
        # An integer beyond every float.
        return None
