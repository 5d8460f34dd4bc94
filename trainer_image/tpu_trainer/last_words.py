"""A host's termination message: the file that the kubelet copies into the pod's status."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

from tpu_trainer.contract import ENV_TERMINATION_LOG
from tpu_trainer.outcome import Outcome, is_more_telling, termination_message


def leave_words(outcome: Outcome, path: str | None = None) -> None:
    """Writes the host's termination message, unless another process of this host has left more telling words.

    `path`: the file, by default the one that the environment names, if it does.
    """
    path = path or os.environ.get(ENV_TERMINATION_LOG)
    if not path:
        return
    try:
        _write(Path(path), outcome)
    except OSError as error:
        print(f"{ENV_TERMINATION_LOG} {path}: cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _write(path: Path, outcome: Outcome) -> None:
    # In place and under a lock: in a pod the path is a mounted file, and all processes of the host share it.
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if is_more_telling(_outcome_name(file.read()), outcome.code):
            return
        file.truncate(0)
        file.write(termination_message(outcome))


def _outcome_name(message: bytes) -> str | None:
    try:
        document = json.loads(message)
    except ValueError:
        return None
    return document.get("outcome") if isinstance(document, dict) else None
