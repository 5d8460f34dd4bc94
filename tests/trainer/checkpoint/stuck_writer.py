"""Ends while a checkpoint is being written to a store that never answers."""

from __future__ import annotations

import threading

from tests.trainer.checkpoint.runs import author, snapshot
from tests.trainer.checkpoint.stores import Intercepted, MemoryStore
from tpu_trainer.checkpoint.catalogue import CheckpointTarget
from tpu_trainer.checkpoint.checkpointer import Checkpointer, CheckpointSchedule
from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.data.order import Position

if __name__ == "__main__":
    asked = threading.Event()

    def never(operation: str) -> None:
        asked.set()
        threading.Event().wait()

    target = CheckpointTarget(Intercepted(MemoryStore(), never), author(), 1)
    checkpoints = Checkpointer(target, CheckpointSchedule(1, None, 9), lambda step, *_: snapshot(step), print)
    checkpoints.save(1, Position(), NumericalHealth())
    asked.wait()
    print("ends")
