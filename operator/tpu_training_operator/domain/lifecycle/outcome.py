"""What worker 0 said about the training when it ended, from its termination message.

A loop of the user's own may write anything there, and nothing in it may keep a finished job from being Succeeded.
"""

from dataclasses import replace
from itertools import islice
from typing import Any

from tpu_training_operator.api.status import MOST_METRICS, Progress, ReportPhase
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.failures.last_words import step_reached
from tpu_training_operator.domain.number_text import number_text
from tpu_training_operator.domain.observed import WorkerPod

_LONGEST_WORDS = 500


def final_progress(leader: WorkerPod, total_steps: int, reported: Progress | None) -> Progress | None:
    """Step, speed and metrics at the end, beside what was `reported` on the way; None where the worker ran a loop that
    says none at its end."""
    message, step = leader.trainer_message, step_reached(leader)
    if message is None or step is None:
        return None
    metrics = _metrics(message.get("metrics"))
    before = reported or Progress(step=0, total_steps=total_steps)
    # An attempt that finds all steps made has no loss of its own to tell.
    known = before.loss if step == before.step else None
    return replace(
        before,
        step=step,
        examples_per_second=number_text(message.get("examplesPerSecond")),
        loss=metrics.get("loss", known),
        metrics=metrics,
        phase=before.phase and ReportPhase.DONE,
        estimated_remaining_seconds=None,
    )


def final_words(leader: WorkerPod) -> str:
    """What the trainer says of its success, in one line: ": trained 300 steps, loss 0.1"; empty where it says none."""
    message = leader.trainer_message or {}
    words = message.get("message") if message.get("outcome") == "Succeeded" else None
    line = next(iter(plain(words).strip().splitlines()), "") if isinstance(words, str) else ""
    return f": {line[:_LONGEST_WORDS]}" if line else ""


def _metrics(given: Any) -> dict[str, str]:
    """The numbers among them, as many as the status has room for."""
    if not isinstance(given, dict):
        return {}
    texts = ((plain(name), number_text(value)) for name, value in given.items())
    return dict(islice(((name, text) for name, text in texts if text is not None), MOST_METRICS))
