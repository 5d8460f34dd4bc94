"""What worker 0 said about the training when it ended, from its termination message. Called by the planner.

A loop of the user's own may write anything there, and nothing in it may keep a finished job from being Succeeded.
"""

import json
from itertools import islice
from typing import Any

from tpu_training_operator.api.status import MOST_METRICS, Progress, ReportPhase
from tpu_training_operator.domain.number_text import number_text
from tpu_training_operator.domain.observed import WorkerPod

# As in the recipe: what a double holds exactly.
_LARGEST_STEP = 2**53
_LONGEST_WORDS = 500


def final_progress(leader: WorkerPod, total_steps: int, reported: Progress | None) -> Progress | None:
    """Step, speed and metrics at the end, beside what was `reported` on the way; None where the worker ran a loop that
    says none at its end."""
    message = _said(leader)
    if not _is_step(message.get("step")):
        return None
    metrics = _metrics(message.get("metrics"))
    before = reported or Progress(step=0, total_steps=total_steps)
    # An attempt that finds all steps made has no loss of its own to tell.
    known = before.loss if message["step"] == before.step else None
    return before.model_copy(
        update={
            "step": message["step"],
            "examples_per_second": number_text(message.get("examplesPerSecond")),
            "loss": metrics.get("loss", known),
            "metrics": metrics,
            "phase": before.phase and ReportPhase.DONE,
            "estimated_remaining_seconds": None,
        }
    )


def final_words(leader: WorkerPod) -> str:
    """What the trainer says of its success, in one line: ": trained 300 steps, loss 0.1"; empty where it says none."""
    message = _said(leader)
    words = message.get("message") if message.get("outcome") == "Succeeded" else None
    if not isinstance(words, str) or not words.strip():
        return ""
    return f": {words.strip().splitlines()[0][:_LONGEST_WORDS]}"


def _said(leader: WorkerPod) -> dict[str, Any]:
    try:
        message = json.loads(str(leader.termination.get("message") or ""))
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_STEP


def _metrics(given: Any) -> dict[str, str]:
    """The numbers among them, as many as the status has room for."""
    if not isinstance(given, dict):
        return {}
    texts = ((name, number_text(value)) for name, value in given.items())
    return dict(islice(((name, text) for name, text in texts if text is not None), MOST_METRICS))
