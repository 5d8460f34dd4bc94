"""Whether a worker's step is the program that was checked: a real run compares its own with the digest of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aot.test_step_on_a_chip import run_spec, traced_steps
from tests.trainer.gang_processes import Launcher, chips
from tpu_contract.protocol import ExitCode

BATCH, PASSES = 8, 2


def one_chip(entrypoint: str, passes: int = 1, batch: int = BATCH, **changes: Any) -> dict[str, Any]:
    document = run_spec(
        slice={"generation": "v5e", "topology": "1x1", "slices": 1, "hosts": 1, "replicas": 1},
        batch={"global": passes * batch, "perReplica": batch, "accumulation": passes},
        warmupSteps=1,
        trainSteps=4,
        parameters={},
        **changes,
    )
    return {**document, "entrypoint": entrypoint}


def mlp(**changes: Any) -> dict[str, Any]:
    return one_chip("tests.aot.models:repeats", **changes) | {"parameters": {"how": "unroll"}}


CASES = {
    "mlp": mlp(),
    "transformer": one_chip("tests.aot.models:transformer", PASSES, precision="BFloat16Mixed", emaDecay="0.9"),
    "lightning": one_chip("tests.trainer.lightning_tasks:pair") | {"parameters": {"lr": "0.01"}},
}
OTHERS = {
    "batch": mlp(batch=2 * BATCH),
    "precision": mlp(precision="BFloat16Mixed"),
    "optimizer": mlp(optimizer={"name": "sgd", "learningRate": "0.02"}),
    "clipping": mlp(gradientClipNorm="1.0"),
    "model": one_chip("tests.aot.models:small"),
}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    traced = traced_steps(tmp_path_factory.mktemp("checked"), CASES | OTHERS)
    return {name: step.get("digest", step.get("error")) for name, step in traced.items()}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.reap()


@pytest.mark.parametrize("name", CASES)
def test_a_worker_finds_that_its_step_is_the_program_that_was_checked(
    name: str, digests: dict[str, str], launcher: Launcher
) -> None:
    gang = launcher.start({**CASES[name], "checkedProgram": digests[name]}, "tests.trainer.chip_replicas", **chips(1))
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert "step 2: this is the program that the entry check has compiled" in gang.hosts[0].output
    assert "CompileCheck" not in gang.warnings()


def test_a_worker_warns_of_another_program(digests: dict[str, str], launcher: Launcher) -> None:
    spec = {**CASES["mlp"], "checkedProgram": digests["batch"]}
    gang = launcher.start(spec, "tests.trainer.chip_replicas", **chips(1))
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert "StepFits says nothing about this run" in gang.warnings()["CompileCheck"][0]


def test_a_comparison_that_fails_costs_a_worker_nothing_but_its_answer(launcher: Launcher) -> None:
    spec = {**one_chip("tests.aot.models:keeps"), "parameters": {"what": "strange"}, "checkedProgram": "0-0"}
    gang = launcher.start(spec, "tests.trainer.chip_replicas", **chips(1))
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert "this is the program that the entry check has compiled: this one has no device" in gang.hosts[0].output


def test_what_changes_the_program_changes_its_digest(digests: dict[str, str]) -> None:
    assert len({digest.partition("-")[0] for digest in digests.values()}) == len(digests)
