"""A run that is killed or stopped at any step, and started again, equals one that was never disturbed, bit for bit.

Real processes and real signals, at places that a seed chooses. Every attempt begins right after the newest checkpoint
that was committed: nothing before it is lost, nothing is trained twice.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import interrupted
from tests.trainer.gang_processes import Gang, Launcher, chips, run_spec
from tpu_contract.protocol import ExitCode
from tpu_trainer.gang.exchange import MOST_STEPS

STEPS = 36


@dataclass(frozen=True)
class Gangs:
    """How a run's processes are made; `chips` replicas in one process, or a process per host that runs `module`."""

    backend: str
    hosts: int = 1
    chips: int = 1
    module: str = "tpu_trainer"

    def start(self, launcher: Launcher, attempt: int = 1, fault: str = "", **changes: Any) -> Gang:
        spec = run_spec(
            entrypoint="tests.trainer.interrupted:task",
            backend=self.backend,
            hosts=self.hosts,
            replicas=self.hosts * self.chips,
            hardware="TPU" if self.chips > 1 else "CPU",
            optimizer="adamw",
            trainSteps=STEPS,
            emaDecay="0.8",
            **changes,
        )
        spec["job"]["attempt"] = attempt
        env = {interrupted.FAULT: fault} if fault else {}
        if self.chips > 1:
            return launcher.start(spec, module="tests.trainer.chip_replicas", **chips(self.chips), **env)
        return launcher.start(spec, module=self.module, **env)


ALONE = Gangs("torch")
TOGETHER = Gangs("torch", hosts=2, module="tests.trainer.checkpoint.small_parts")
# Few on the kinds of torch_xla: starting it takes longer than all the steps.
SEEDS = [
    pytest.param(ALONE, 1, id="torch, stopped at a step with a checkpoint"),
    pytest.param(ALONE, 10, id="torch, stopped first"),
    pytest.param(ALONE, 11, id="torch, killed near the end"),
    pytest.param(TOGETHER, 16, id="two hosts, the second killed"),
    pytest.param(TOGETHER, 17, id="two hosts, the second stopped"),
    pytest.param(TOGETHER, 6, id="two hosts, killed before any checkpoint"),
    pytest.param(Gangs("xla"), 18, id="xla, killed first"),
    pytest.param(Gangs("xla", chips=2), 24, id="chips, killed"),
]


class Undisturbed(NamedTuple):
    """What is left of a run that nothing disturbs."""

    losses: list[float]
    weights: dict[tuple[str, str], bytes]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Gangs], Undisturbed]:
    """Per kind of gang."""
    known: dict[Gangs, Undisturbed] = {}

    def run(gangs: Gangs) -> Undisturbed:
        if gangs not in known:
            directory = tmp_path_factory.mktemp("uninterrupted")
            launcher = Launcher(directory)
            try:
                gang = gangs.start(launcher, checkpoint={"uri": str(directory / "checkpoints"), "keep": 1})
                assert set(gang.wait()) == {0}, gang.output()
                known[gangs] = Undisturbed(gang.losses(), weights(directory / "checkpoints"))
            finally:
                launcher.reap()
        return known[gangs]

    return run


def weights(directory: Path) -> dict[tuple[str, str], bytes]:
    """The tensors at the end of the run: the weights, the optimizer's, and the average of the weights."""
    (last,) = directory.glob(f"step-{STEPS:08d}-*/COMMIT")
    tensors = {
        (path.name.split("-")[0].split(".")[0], name): tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for path in last.parent.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert {file for file, _ in tensors} == {"model", "optimizer", "ema"}
    return tensors


def committed(directory: Path) -> int:
    """The newest step in a checkpoint that is whole; 0 where there is none."""
    return max((json.loads(path.read_bytes())["step"] for path in directory.glob("step-*/COMMIT")), default=0)


def losses_by_step(gang: Gang) -> dict[int, float]:
    return gang.recorded().by_step


@pytest.mark.parametrize(("gangs", "seed"), SEEDS)
def test_a_run_killed_or_stopped_anywhere_continues_as_if_nothing_had_happened(
    launcher: Launcher, tmp_path: Path, gangs: Gangs, seed: int, uninterrupted: Callable[[Gangs], Undisturbed]
) -> None:
    chosen = random.Random(seed)
    checkpoints = tmp_path / "checkpoints"
    checkpoint = {"uri": str(checkpoints), "everySteps": chosen.randint(2, 9), "keep": chosen.randint(1, 3)}
    expected = dict(enumerate(uninterrupted(gangs).losses, start=1))
    for attempt in range(1, chosen.randint(1, 2) + 1):
        begun = committed(checkpoints)
        host, call = chosen.randrange(gangs.hosts), chosen.randint(1, STEPS - begun - 1)
        name = chosen.choice(["KILL", "TERM"])
        gang = gangs.start(launcher, attempt, f"{host}:{call}:{name}", checkpoint=checkpoint)
        codes = gang.wait()
        if name == "KILL":
            # A killed chip's process is missed by the one that started it.
            killed = -signal.SIGKILL if gangs.chips == 1 else ExitCode.InternalError
            assert codes.pop(host) == killed, gang.output()
            assert set(codes) <= {ExitCode.PeerLost}, gang.output()
        else:
            # Where the device works ahead, a wish in the last steps is read when all are done.
            late = gangs.backend == "xla" and begun + call >= STEPS - MOST_STEPS
            done = late and committed(checkpoints) == STEPS
            assert set(codes) == {ExitCode.Succeeded if done else ExitCode.Preempted}, gang.output()
            assert gang.hosts[0].message()["step"] == committed(checkpoints) >= begun + call, gang.output()
        assert losses_by_step(gang).items() <= expected.items()
        assert min(losses_by_step(gang), default=begun + 1) == begun + 1
        if committed(checkpoints) == STEPS:
            break
    begun = committed(checkpoints)
    gang = gangs.start(launcher, 9, checkpoint=checkpoint)
    assert set(gang.wait()) == {ExitCode.Succeeded}, gang.output()
    assert losses_by_step(gang) == {step: loss for step, loss in expected.items() if step > begun}
    assert weights(checkpoints) == uninterrupted(gangs).weights
