"""Prints what the entry check finds of a task that calls a kernel, as torch_xla calls one in Pallas.

A process of its own: one that has imported jax gets a warning with every fork, and so would the tests after it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.trainer import tasks
from tests.trainer.checks.test_entry_check import check
from tpu_trainer import Hyperparameters, Task


def task(hp: Hyperparameters) -> Task:
    import jax
    from jax.experimental import pallas

    def double(read: Any, written: Any) -> None:
        written[...] = read[...] * 2

    def loss(model: Any, batch: Any) -> Any:
        shape = jax.ShapeDtypeStruct((8, 128), "float32")
        jax.jit(pallas.pallas_call(double, out_shape=shape)).lower(shape)

    return replace(tasks.small(hp), loss=loss)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    outcome = check(Path(os.environ["TEST_FOLDER"]), "checks.kernel_check:task")
    print(json.dumps([outcome.code, outcome.step, outcome.message]))
