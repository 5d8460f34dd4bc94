"""The trainer's own tests on the second stack: those that look at what torch does, and need no torch_xla."""

from __future__ import annotations

from tests.layers import ON_THE_SECOND_STACK
from tests.stacks import second

TESTS = {
    "checkpoint": ("checkpointer", "initial", "snapshot", "together"),
    "data": ("data", "same_data", "shards", "stream"),
    "doctor": ("doctor_counts", "doctor_padding"),
    "gang": ("average", "exchange"),
    "lightning": ("lightning_hooks", "lightning_validation"),
    # The second starts whole gangs, on torch with gloo.
    "loop": ("not_finite", "trajectories"),
    "optim": ("clipping", "device_optimizers", "schedule"),
    "task": ("logbook", "task", "task_arguments", "task_hooks", "weighted_loss"),
    "worker": ("parts",),
}


def test_the_trainers_tests_hold_without_torch_xla() -> None:
    ran = second.run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not xla and not chips and not spmd"),
        *(f"tests/trainer/{room}/test_{name}.py" for room, names in TESTS.items() for name in names),
        **{ON_THE_SECOND_STACK: "1", "CI": ""},
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
