"""`python -m tpu_trainer` whose host is told to stop, twice, while the first checkpoint is being written."""

from __future__ import annotations

import os
import signal
import sys
from itertools import count

from tpu_trainer.storage.store import DirectoryStore
from tpu_trainer.worker.entry import main

_writes = count()
_put = DirectoryStore.put


def put_and_be_told(self: DirectoryStore, name: str, data: bytes) -> None:
    if "safetensors" in name and next(_writes) < 2:
        os.kill(os.getpid(), signal.SIGTERM)
    _put(self, name, data)


DirectoryStore.put = put_and_be_told

if __name__ == "__main__":
    sys.exit(main())
