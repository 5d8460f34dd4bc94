"""What a worker said when it ended. Called by the classifier.

The trainer writes JSON into its termination message. For a loop of the user's own, which writes nothing, the kubelet
puts the end of the container's log there (`terminationMessagePolicy: FallbackToLogsOnError`).
"""

import json

from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.observed import WorkerPod

LONGEST_MESSAGE = 1000
"""Characters of a failure's message; the status has room for 1024."""


def last_words(pod: WorkerPod) -> str:
    """The message in a trainer's termination message, or the message itself where it is plain text."""
    text = str(pod.termination.get("message") or "").strip()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return plain(text)
    return plain(str(parsed.get("message", "")) if isinstance(parsed, dict) else text)


def cut(message: str) -> str:
    """The end of the message: that is where a traceback says what was wrong."""
    return message[-LONGEST_MESSAGE:]


def with_ending(what: str, words: str, separator: str = ": ") -> str:
    """What happened and, as far as there is room, the end of what was said."""
    room = LONGEST_MESSAGE - len(what) - len(separator)
    return f"{what}{separator}{words[-room:]}" if words and room > 0 else cut(what)
