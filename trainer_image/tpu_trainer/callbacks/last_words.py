"""How a process of a user's own loop ends: what its host says in the termination message, and its exit code."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import traceback
from pathlib import Path

from tpu_trainer.contract import ENV_TERMINATION_LOG, ExitCode
from tpu_trainer.errors import TrainerError
from tpu_trainer.outcome import Outcome, is_more_telling, termination_message

_LOST_CONNECTION = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_LOST_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")


def outcome_of_own(error: BaseException, step: int | None) -> Outcome:
    """What an exception of the user's own loop means; the message is one line for what is known, or a traceback."""
    if isinstance(error, TrainerError):
        return Outcome(error.code, str(error), step if error.step is None else error.step)
    if isinstance(error, SystemExit):
        said = error.code if isinstance(error.code, str) else f"the program called sys.exit({error.code!r})"
        return Outcome(_named(error.code), said, step)
    code = ExitCode.PeerLost if _lost_a_peer(error) else ExitCode.UserError
    return Outcome(code, "".join(traceback.format_exception(error)).rstrip(), step)


def leave_words(outcome: Outcome, *, first: bool, path: str | None = None) -> None:
    """Writes the host's termination message, unless another process of this host has left more telling words.

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
        if is_more_telling(said, outcome.code) or (said == outcome.code.name and not first):
            return
        file.truncate(0)
        file.write(termination_message(outcome))


def _outcome_name(message: bytes) -> str | None:
    try:
        document = json.loads(message)
    except ValueError:
        return None
    return document.get("outcome") if isinstance(document, dict) else None


def _named(code: object) -> ExitCode:
    try:
        return ExitCode(0 if code is None else code)  # type: ignore[arg-type]
    except ValueError:
        return ExitCode.UserError


def _lost_a_peer(error: BaseException) -> bool:
    """gloo has no error type of its own for a peer that closed its connection."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & set(_LOST_PEERS):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_CONNECTION)
