"""How a process of a user's own loop ends: what an exception of its program means."""

from __future__ import annotations

import traceback

from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.protocol import ExitCode

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
