"""The failures that a worker can name, each with its exit code; their words; and the boundary around the user's code.

Only `replica` and `entry` turn a failure into an exit of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import ClassVar

from tpu_contract.protocol import ExitCode
from tpu_contract.slice_check import SliceCheckLine


class TrainerError(Exception):
    """A failure whose cause is known; its text is one line. `step`: the last step done, if known."""

    code: ClassVar[ExitCode]

    def __init__(self, text: str, step: int | None = None) -> None:
        super().__init__(text)
        self.step = step


class BadSpecError(TrainerError):
    """The run spec or the environment is missing, unreadable, has another schema, or contradicts itself."""

    code = ExitCode.BadSpec


class UserCodeError(TrainerError):
    """The user's code raised, or returned something a task must not. An exception it raised is the `__cause__`."""

    code = ExitCode.UserError


class PeerLostError(TrainerError):
    """The other hosts could not be reached, or one of them went away during a collective. `absent`: those that never
    arrived, where they are known."""

    code = ExitCode.PeerLost

    def __init__(self, text: str, step: int | None = None, absent: Sequence[int] = ()) -> None:
        super().__init__(text, step)
        self.absent = tuple(absent)


class PreemptedError(TrainerError):
    """The worker was asked to stop and ended before all replicas agreed to: before the first step, or by os._exit."""

    code = ExitCode.Preempted


class SliceUnfitError(TrainerError):
    """This host failed a line of the slice check. `line`: that line."""

    code = ExitCode.SliceUnfit

    def __init__(self, line: SliceCheckLine) -> None:
        super().__init__(str(line))
        self.line = line


class StorageError(TrainerError):
    """Checkpoints could not be read or written, for a reason that may pass: no connection, no space."""

    code = ExitCode.StorageFailed


class StorageDeniedError(StorageError):
    """Checkpoints could not be read or written, and a retry will not help: no rights, credentials or bucket."""

    code = ExitCode.StorageDenied


class CheckpointUnusableError(TrainerError):
    """The job has checkpoints but can continue from none of them, and a new start at step 0 would discard their
    work."""

    code = ExitCode.CheckpointUnusable


class OtherModelError(CheckpointUnusableError):
    """The checkpoints are complete, but belong to another task, model or seed."""


class DivergedError(TrainerError):
    """The replicas no longer run the same program, or no longer hold the same parameters."""

    code = ExitCode.Diverged


class NotFiniteError(TrainerError):
    """The loss or its gradients are not finite, and the recipe asks to stop then."""

    code = ExitCode.NotFinite


class user_code:  # noqa: N801 - reads as a statement: `with user_code("the loss"):`
    """Turns what the user's code raises in the block into a UserCodeError.

    A class and not a generator, so that it adds no frames to the traceback that the user sees. SystemExit counts as an
    error, too: a task that exits would otherwise end the gang without a termination message.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, TrainerError):
            if isinstance(error, AttributeError) and error.name == "xla" and _is_torch(error.obj):
                error.add_note(
                    "torch.utils.checkpoint does not know XLA devices; use torch_xla.utils.checkpoint.checkpoint, "
                    "which also keeps XLA from undoing the recomputation"
                )
            raise UserCodeError(f"{self._doing}: {type(error).__name__}: {error}") from error


def _is_torch(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == "torch"
