"""trainer.torch.execution: Compile on CPUs with gloo and inductor, which builds its programs with the C++ compiler."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

from tests.trainer.fork_server import COMPILER
from tests.trainer.gang_processes import ON_INDUCTOR, Gang, Launcher, run_spec
from tests.trainer.loop.test_trajectories import assert_follows_reference
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.gang.compiled import check_compiler, compile_update

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and not os.environ.get("CI"), reason="no g++ to compile with; in CI that is an error"
)

COMPILED = {"device": "cpu", "collectives": "gloo", "processesPerHost": 1, "execution": "Compile"}


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Programs are built once: all processes find them in one cache."""
    return {**ON_INDUCTOR, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.reap()


def start(launcher: Launcher, variables: dict[str, str], replicas: int, **changes: Any) -> Gang:
    """Passes of two examples, whatever the number of replicas: so all of them run the same programs."""
    batch = {"global": 16, "perReplica": 2, "accumulation": 8 // replicas}
    spec = run_spec(**{"hosts": replicas, "replicas": replicas, "torch": COMPILED, "batch": batch, **changes})
    return launcher.start(spec, packages=COMPILER, **variables)


@pytest.mark.parametrize(("replicas", "optimizer"), [(1, "adamw"), (2, "sgd")])
def test_compiled_steps_equal_plain_pytorch_on_the_whole_batch(
    launcher: Launcher, variables: dict[str, str], replicas: int, optimizer: str
) -> None:
    gang = start(launcher, variables, replicas, optimizer=optimizer, entrypoint="tests.trainer.tasks:counted")
    assert_follows_reference(gang, optimizer)
    assert "torch.compile makes programs" in gang.output()
    # The rate changes in every step, and no step after the first ones compiles.
    assert "Recompilation" not in gang.output()
    compiled = re.search(r"first loss after [0-9.]+ s, [0-9.]+ s of them compiling", gang.output())
    assert compiled is not None, gang.output()


def test_a_new_shape_after_the_first_steps_is_told(launcher: Launcher, variables: dict[str, str]) -> None:
    gang = start(launcher, variables, 1, trainSteps=6, entrypoint="tests.trainer.compiling_tasks:reshaping")
    assert gang.wait() == [0], gang.output()
    assert "RecompilationAfterWarmUp" in gang.output()
    assert "step it was [2, 8] float32" in gang.output()


def test_what_the_compiler_does_not_take_runs_beside_it(launcher: Launcher, variables: dict[str, str]) -> None:
    """A loss that logs, under autocast, with an optimizer that is not torch's own: as without the compiler."""
    changes = {"trainSteps": 6, "optimizer": "lion", "precision": "BFloat16Mixed"}
    task = {"entrypoint": "tests.trainer.compiling_tasks:logging"}
    gangs = [start(launcher, variables, 1, **changes, **task)]
    gangs.append(start(launcher, variables, 1, **changes, **task, torch={**COMPILED, "execution": "Eager"}))
    assert [gang.wait() for gang in gangs] == [[0], [0]], gangs[0].output()
    compiled, eager = gangs
    assert compiled.losses() == pytest.approx(eager.losses(), abs=1e-3)
    assert "Lion is not torch's own" in compiled.output()
    metrics = [gang.hosts[0].message()["metrics"] for gang in gangs]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-3)
    assert "twice" in metrics[0]


def test_an_optimizer_whose_groups_ask_for_foreach_has_a_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tpu_trainer.gang.compiled._compile", lambda function, _: torch.compile(function, backend="eager")
    )

    def trained(*, with_program: bool) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=True)
        if with_program:
            assert compile_update(optimizer, torch.device("cpu"))
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            weight.grad = torch.arange(3.0)
            optimizer.step()
            assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["foreach"]) == (0.1 / (1 + step), True)
        return weight.detach()

    assert torch.allclose(trained(with_program=True), trained(with_program=False))


@pytest.mark.parametrize("joins", [2, 3, 5])
def test_a_parameter_that_joins_late_keeps_its_momentum(joins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced and guarded as for inductor, but not built.
    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, backend, **named: plain(function, backend="aot_eager", **named)
    )
    device = torch.device("cpu")

    def trained(*, compiles: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        first, second, late, last = parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
        groups = [{"params": [first], "lr": 0.01}, {"params": [second, late, last]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        assert not compiles or compile_update(optimizer, device)
        for step in range(1, 8):
            for parameter in parameters:
                gradient = torch.randn(3, generator=generator)
                parameter.grad = gradient if step >= joins or parameter is not late else None
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    for compiled, expected in zip(trained(compiles=True), trained(compiles=False), strict=True):
        torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_compiler_the_run_says_which_one_is_missing(
    device: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BadSpecError) as caught:
        check_compiler(device)
    assert str(caught.value) == snapshot


def test_torchtpu_brings_its_own_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_compiler("tpu")
