"""What worker 0 said about the training when it ended, from its termination message. Called by the planner."""

import json
import math
from typing import Any

from tpu_training_operator.api.status import Progress
from tpu_training_operator.domain.observed import WorkerPod


def final_progress(leader: WorkerPod, total_steps: int) -> Progress | None:
    """Step, speed and metrics at the end; None where the worker ran a loop that reports none."""
    try:
        message = json.loads(str(leader.termination.get("message") or ""))
    except ValueError:
        return None
    if not isinstance(message, dict) or not isinstance(message.get("step"), int):
        return None
    metrics = {
        str(name): text
        for name, value in dict(message.get("metrics") or {}).items()
        if (text := _number(value)) is not None
    }
    return Progress(
        step=message["step"],
        total_steps=total_steps,
        examples_per_second=_number(message.get("examplesPerSecond")),
        loss=metrics.get("loss"),
        metrics=metrics,
    )


def _number(value: Any) -> str | None:
    """A finite or infinite number as text, to six digits; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return f"{value:.6g}" if math.isfinite(value) else str(value)
