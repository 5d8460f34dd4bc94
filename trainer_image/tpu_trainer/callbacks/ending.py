"""How a process of the user's own loop ends: what an exception of its program means, and a call of os._exit.

os._exit runs no handler, and with code 0 it looks like a complete training: the code is all that the kubelet sees.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from tpu_contract.protocol import ExitCode
from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.contract.outcome import Outcome

_LOST_CONNECTION = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_LOST_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")


def outcome_of_loop(error: BaseException, step: int | None) -> Outcome:
    """Returns what an exception of the user's own loop means; its message is one line if the error is known, or a
    traceback."""
    if isinstance(error, TrainerError):
        return Outcome(error.code, str(error), step if error.step is None else error.step)
    if isinstance(error, SystemExit):
        message = error.code if isinstance(error.code, str) else f"the program called sys.exit({error.code!r})"
        return Outcome(_exit_code(error.code), message, step)
    code = ExitCode.PeerLost if _lost_a_peer(error) else ExitCode.UserError
    return Outcome(code, "".join(traceback.format_exception(error)).rstrip(), step)


def _exit_code(code: object) -> ExitCode:
    try:
        return ExitCode(0 if code is None else code)  # type: ignore[arg-type]
    except ValueError:
        return ExitCode.UserError


def _lost_a_peer(error: BaseException) -> bool:
    """Recognizes lost peers by the message, too: gloo has no error type for a peer that closed its connection."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & set(_LOST_PEERS):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_CONNECTION)


class ExitHook:
    """From `listen` to `forget`, os._exit(0) asks `code_of` for the code with which the process really ends."""

    def __init__(self, code_of: Callable[[], int]) -> None:
        self._code_of = code_of
        self._process = os.getpid()
        self._before: Callable[[int], NoReturn] = os._exit
        self._hook: Callable[[int], NoReturn] = self._leave

    def listen(self) -> None:
        os._exit = self._hook  # type: ignore[assignment]

    def forget(self) -> None:
        if os._exit is self._hook:
            os._exit = self._before  # type: ignore[assignment]

    def _leave(self, status: int) -> NoReturn:
        # Forked children, such as a DataLoader's workers, end in this way.
        if os.getpid() == self._process and not status:
            self.forget()
            try:
                status = self._code_of()
                sys.stdout.flush()
            except BaseException:
                # Whatever fails here, the process ends.
                traceback.print_exc()
                status = 1
        self._before(status)
