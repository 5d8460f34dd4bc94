"""A training on both stacks: the same losses, and a checkpoint of either continued on the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.layers import SECOND_STACK
from tests.trainer.gang_processes import Launcher, run_spec

CLOSE = 1e-5
"""Float32 sums in another order differ by some 1e-7."""

STEPS, MIDDLE = 24, 12

STACKS = ("torch_xla", "torch_tpu")
"""torch_xla's CPU device with gloo between its processes; and the torch of TorchTPU with gloo. No machine of the tests
has a TPU, on which TorchTPU would compute."""


def start(launcher: Launcher, stack: str, folder: Path, attempt: int) -> Any:
    spec = run_spec(
        backend="xla" if stack == "torch_xla" else "torch",
        hosts=2,
        replicas=4,
        trainSteps=STEPS,
        checkpoint={"uri": str(folder), "everySteps": MIDDLE, "keep": 9},
    )
    spec["job"]["attempt"] = attempt
    if stack == "torch_xla":
        return launcher.start(spec)
    return launcher.start(spec, python=str(SECOND_STACK))


def losses(gang: Any) -> list[float]:
    assert set(gang.wait()) == {0}, gang.output()
    return list(gang.losses())


@dataclass(frozen=True)
class Runs:
    """`whole`: the losses of an uninterrupted run, by stack. `rest`: those of one that began with the other stack's
    checkpoint."""

    whole: dict[str, list[float]]
    rest: dict[str, list[float]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    base = tmp_path_factory.mktemp("stacks")
    launcher = Launcher(base)
    try:
        gangs = {stack: start(launcher, stack, base / stack, 1) for stack in STACKS}
        whole = {stack: losses(gang) for stack, gang in gangs.items()}
        for saved_by, continued_by in (STACKS, STACKS[::-1]):
            (middle,) = (base / saved_by).glob(f"step-{MIDDLE:08}-*")
            shutil.copytree(middle, base / f"for-{continued_by}" / middle.name)
        gangs = {stack: start(launcher, stack, base / f"for-{stack}", 2) for stack in STACKS}
        yield Runs(whole, {stack: losses(gang) for stack, gang in gangs.items()})
    finally:
        launcher.reap()


def test_both_stacks_train_to_the_same_losses(runs: Runs) -> None:
    assert len(runs.whole["torch_xla"]) == STEPS
    assert runs.whole["torch_tpu"] == pytest.approx(runs.whole["torch_xla"], abs=CLOSE)


@pytest.mark.parametrize("stack", STACKS)
def test_a_checkpoint_of_the_other_stack_continues_as_if_nothing_had_happened(runs: Runs, stack: str) -> None:
    assert len(runs.rest[stack]) == STEPS - MIDDLE
    assert runs.rest[stack] == pytest.approx(runs.whole[stack][MIDDLE:], abs=CLOSE)
