"""`python -m tpu_trainer` that notes how many bytes of checkpoints this host has read, but for the COMMITs, which
retention reads, and the history, which each write of it reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tpu_contract.protocol import HISTORY_FILE
from tpu_trainer.checkpoint.commit import COMMIT
from tpu_trainer.storage.store import DirectoryStore
from tpu_trainer.worker.entry import main

READS = "TEST_READS"
"""A folder for one file per host."""

if __name__ == "__main__":
    read, counted = DirectoryStore.read, [0]

    def counting(store: DirectoryStore, name: str) -> bytes:
        data = read(store, name)
        counted[0] += 0 if name.endswith((COMMIT, HISTORY_FILE)) else len(data)
        return data

    DirectoryStore.read = counting
    code = main()
    Path(os.environ[READS], os.environ["TPUJOB_HOST_INDEX"]).write_text(str(counted[0]))
    sys.exit(code)
