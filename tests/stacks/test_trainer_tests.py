"""The trainer's own tests on the second stack: those that look at what torch does, and need no torch_xla."""

from __future__ import annotations

import pytest

from tests.layers import ON_THE_SECOND_STACK
from tests.stacks import second

PIECES = (
    *("average", "clipping", "data", "device_optimizers", "exchange", "logbook", "not_finite", "parts", "same_data"),
    *("schedule", "shards", "stream", "task", "task_arguments", "task_hooks", "weighted_loss"),
    *("doctor_counts", "doctor_padding", "lightning_hooks", "lightning_validation"),
)

CHECKPOINTS = ("checkpointer", "initial", "snapshot", "together")

GANGS = ("trajectories",)
"""Whole gangs on torch with gloo."""


@pytest.mark.parametrize(
    "files",
    [
        [*(f"test_{name}.py" for name in PIECES), *(f"checkpoint/test_{name}.py" for name in CHECKPOINTS)],
        [f"test_{name}.py" for name in GANGS],
    ],
    ids=["pieces", "gangs"],
)
def test_the_trainers_tests_hold_without_torch_xla(files: list[str]) -> None:
    ran = second.run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not xla and not chips and not spmd"),
        *(f"tests/trainer/{name}" for name in files),
        **{ON_THE_SECOND_STACK: "1", "CI": ""},
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
