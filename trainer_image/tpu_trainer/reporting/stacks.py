"""Where all threads of this process are, as text: what a person wants to know of a worker that hangs."""

from __future__ import annotations

import faulthandler
import tempfile

from tpu_trainer.contract import STACKS_LIMIT


def stacks() -> str:
    """The newest frames first, the main thread last; of a text that is too long the end, STACKS_LIMIT bytes.

    Through a file, because faulthandler writes without Python's help: it reads no source either, which may be on the
    very storage that hangs.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        size = file.tell()
        file.seek(max(0, size - STACKS_LIMIT))
        return file.read().decode("utf-8", "replace")
