"""A rung of a ladder: the first steps of a training, and what is measured of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer import tasks
from tests.trainer.whole_runs import run
from tpu_contract.run_spec import RunSpecError
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import termination_message
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.rung import RungNumbers
from tpu_trainer.task.task import Hyperparameters, Task

ALONE = {"device": "cpu", "collectives": "gloo", "processesPerHost": 1}


def small(hp: Hyperparameters, rank: int) -> Task:
    return tasks.small(hp)


def told(**spec: Any) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(termination_message(run(small, **spec).outcome))
    return message


def test_a_rung_makes_the_first_steps_of_its_training() -> None:
    schedule = {"name": "Cosine"}
    rung, whole = (run(small, replicas=2, schedule=schedule, **more) for more in ({"endAfterSteps": 12}, {}))
    assert rung.losses == whole.losses[:12]
    assert rung.outcome.step == 12
    assert rung.total_steps == 12


def test_a_rung_says_what_it_measured() -> None:
    message = told(endAfterSteps=12)
    losses = run(small, endAfterSteps=12).losses
    assert message["rung"]["firstLoss"] == pytest.approx(sum(losses[:3]) / 3)
    assert message["rung"]["lastLoss"] == pytest.approx(sum(losses[-3:]) / 3)
    assert {name: message["rung"][name] for name in ("averaged", "recompilations", "notFinite")} == {
        "averaged": 3,
        "recompilations": 0,
        "notFinite": 0,
    }
    # The steps are so short that their input may take as long.
    assert message["rung"]["findings"].keys() <= {"InputBound"}
    assert message["examplesPerSecond"] > 0


def test_a_rung_says_what_it_could_not_see_and_which_metrics_are_the_evaluations() -> None:
    def evaluated(hp: Hyperparameters, rank: int) -> Task:
        task = tasks.small(hp)
        return Task(task.model, task.train, task.loss, evaluation=task.train, metrics=ones)

    message = json.loads(termination_message(run(evaluated, endAfterSteps=12).outcome))
    assert message["metrics"].keys() == {"loss", "one"}
    assert message["rung"]["evaluated"] == ["one"]
    # On this backend nothing is compiled, and nothing counts what the device does.
    assert "HostSync" in message["rung"]["unseen"]
    assert "InputBound" not in message["rung"]["unseen"]


def test_programs_of_torch_compile_are_counted_so_a_rung_sees_those_that_come_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tpu_trainer.gang.compiled._compile", lambda function, _: function)
    unseen = told(endAfterSteps=12, torch={**ALONE, "execution": "Compile"})["rung"]["unseen"]
    assert {"RecompilationAfterWarmUp", "UnequalCompilations"}.isdisjoint(unseen)
    assert "RecompilationAfterWarmUp" in told(endAfterSteps=12, torch=ALONE)["rung"]["unseen"]


def ones(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"one": torch.ones(len(batch[0]))}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_job_on_top_of_a_ladder_says_what_its_first_steps_show_and_goes_on(replicas: int) -> None:
    whole, rung = (run(small, replicas=replicas, **more) for more in ({}, {"endAfterSteps": 13}))
    job = run(small, replicas=replicas, judgeAfterSteps=13)
    assert job.losses == whole.losses
    assert job.outcome.step == 40
    assert job.outcome.rung is not None
    assert rung.outcome.rung is not None
    assert (job.outcome.rung["begins"], job.outcome.rung["steps"]) == (0, 13)
    for name in ("firstLoss", "lastLoss", "errorsFallen", "curve", "recompilations", "notFinite"):
        assert job.outcome.rung[name] == rung.outcome.rung[name], name


def test_a_job_that_continues_judges_the_steps_from_there(tmp_path: Path) -> None:
    place = {"checkpoint": {"uri": str(tmp_path), "keep": 1}}
    run(small, endAfterSteps=12, **place)
    numbers = run(small, judgeAfterSteps=10, **place).outcome.rung
    assert numbers is not None
    assert (numbers["begins"], numbers["steps"]) == (12, 10)
    # A training that is shorter is judged at its end.
    numbers = run(small, judgeAfterSteps=1000).outcome.rung
    assert numbers is not None
    assert (numbers["begins"], numbers["steps"]) == (0, 40)


def test_a_whole_training_measures_nothing_for_gates() -> None:
    assert "rung" not in told()


def test_a_rung_longer_than_its_training_ends_with_it() -> None:
    assert told(endAfterSteps=1000)["step"] == 40


def test_the_job_continues_what_a_rung_has_trained(tmp_path: Path) -> None:
    place = {"uri": str(tmp_path / "small.rungs" / "5f0c-1"), "keep": 1}
    run(small, endAfterSteps=12, checkpoint=place)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    own = {"uri": str(tmp_path / "small"), "keep": 1, "resumeFrom": place["uri"]}
    assert run(small, job=job, checkpoint=own).losses == pytest.approx(run(small).losses[12:], rel=1e-6)


def laddered(root: Path, attempt: int, **more: Any) -> dict[str, Any]:
    """The last rung of the job with the uid 5f0c."""
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": attempt}
    rungs = f"{root}/small.rungs/5f0c-"
    return {"job": job, "checkpoint": {"uri": f"{root}/small", "keep": 1, "rungs": rungs, **more}}


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """A rung that was repeated, and one of another job of that name."""
    for place in ("5f0c-1", "5f0c-2", "77aa-1"):
        run(small, endAfterSteps=12, checkpoint={"uri": str(tmp_path / "small.rungs" / place), "keep": 1})
    return tmp_path


def places(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("small.rungs/*"))


def test_what_its_rungs_have_left_goes_when_the_job_has_succeeded(ladder: Path) -> None:
    resumes = f"{ladder}/small.rungs/5f0c-2"
    assert run(small, **laddered(ladder, 3, resumeFrom=resumes)).outcome.step == 40
    assert places(ladder) == ["77aa-1"]
    # An attempt that finds nothing left to train finds no rung either.
    assert run(small, **laddered(ladder, 4, resumeFrom=resumes)).outcome.step == 40


def test_the_last_checkpoint_of_rungs_leaves_no_folder(tmp_path: Path) -> None:
    run(small, endAfterSteps=12, checkpoint={"uri": f"{tmp_path}/small.rungs/5f0c-1", "keep": 1})
    run(small, **laddered(tmp_path, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_rungs_that_cannot_be_removed_are_a_warning(ladder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(prefix: str) -> int:
        raise StorageError("no")

    monkeypatch.setattr("tpu_trainer.checkpoint.checkpointer.remove_rungs", refuses)
    done = run(small, **laddered(ladder, 3))
    assert done.outcome.step == 40
    assert any("lower rungs of the ladder" in warning for warning in done.warnings)


@pytest.mark.parametrize("rungs", ["/", "{root}/small.rungs/", "{root}/other.rungs/5f0c-", "{root}/small/step-"])
def test_a_run_spec_that_would_remove_anything_else_is_refused(tmp_path: Path, rungs: str) -> None:
    spec = laddered(tmp_path, 3, rungs=rungs.format(root=tmp_path))
    with pytest.raises(RunSpecError, match=r"checkpoint\.rungs"):
        run(small, **spec)


def test_a_rung_does_not_finish_the_task() -> None:
    finished: list[bool] = []

    def finishing(hp: Hyperparameters, rank: int) -> Task:
        task = tasks.small(hp)
        return Task(model=task.model, train=task.train, loss=task.loss, finish=lambda model: finished.append(True))

    run(finishing, endAfterSteps=12)
    assert finished == []
    run(finishing)
    assert finished == [True]


def test_findings_are_counted_by_kind_and_have_a_bound() -> None:
    numbers = RungNumbers()
    for kind in ("HostSync", "HostSync", *map(str, range(1000))):
        numbers.add_finding(Finding(kind, 1, "seen"))
    found = numbers.as_json(LossTrend(0), 0, 0, 16)["findings"]
    assert found["HostSync"] == 2
    assert len(found) == 24
