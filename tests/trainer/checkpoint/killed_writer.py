"""Writes checkpoints into TEST_STORE as fast as it can, and says each that is whole, until it is killed."""

from __future__ import annotations

import os

from tests.trainer.checkpoint.runs import author, commit
from tpu_trainer.storage import open_store

if __name__ == "__main__":
    store = open_store(os.environ["TEST_STORE"])
    step = 0
    while True:
        step += 1
        commit(store, step, author(), keep=2)
        print(step, flush=True)
