"""The weights at the end of a training: those that are evaluated are saved, and are what `finish` gets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.trainer import in_process, lightning_zoo
from tests.trainer.gang_processes import Launcher, start_replicas
from tests.trainer.lightning.test_lightning_trainer import spec as lightning_spec
from tests.trainer.tasks import weighed
from tests.trainer.whole_runs import Ran, Stopping, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hooks, Task
from tpu_trainer.loop.checkpoints import CheckpointStorage
from tpu_trainer.task.task import Hyperparameters


class Scaling(Hooks):
    """Multiplies the weights where `name` is called: anything that hooks do at the end, such as averaging or pruning,
    but not harmless if it is done twice."""

    def __init__(self, model: nn.Module, name: str, factor: float = 0.5) -> None:
        self._model, self._name, self._factor = model, name, factor
        self.calls = 0
        self.stopped: list[bool] = []

    @torch.no_grad()
    def _scale(self, name: str) -> None:
        if name == self._name:
            self.calls += 1
            for parameter in self._model.parameters():
                parameter.mul_(self._factor)

    def epoch_ends(self, epoch: int) -> None:
        self._scale("epoch_ends")

    def train_ends(self, *, stopped: bool) -> None:
        self.stopped.append(stopped)
        self._scale("train_ends")

    def evaluation_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        self._scale("evaluation_ends")


class Ending:
    """Runs of one job whose hooks change the weights at the end."""

    def __init__(self, directory: Path, name: str, factor: float = 0.5) -> None:
        self.directory, self.name, self.factor = directory, name, factor
        self.hooks: list[Scaling] = []
        self.finished: list[float] = []

    def made(self, hp: Hyperparameters, rank: int) -> Task:
        task = weighed(hp)
        hooks = Scaling(task.model, self.name, self.factor)
        self.hooks.append(hooks)
        return replace(task, hooks=hooks, finish=lambda model: self.finished.append(length(model.state_dict())))

    def run(self, replicas: int = 1, attempt: int = 1, **spec: Any) -> Ran:
        checkpoint = {"uri": str(self.directory), "keep": 1, **spec.pop("checkpoint", {})}
        job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": attempt}
        ran = run(self.made, replicas, job=job, **{"trainSteps": 6, "checkpoint": checkpoint, **spec})
        assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
        return ran

    @property
    def newest(self) -> Path:
        return max(path.parent for path in self.directory.glob("*/COMMIT"))

    @property
    def saved(self) -> float:
        """What the newest checkpoint has of what was evaluated."""
        files = [self.newest / name for name in ("model.safetensors", "ema.safetensors")]
        return length({name: value for file in files if file.exists() for name, value in load_file(file).items()})

    @property
    def commit(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.newest / "COMMIT").read_text())
        return document


def length(weights: Mapping[str, Tensor]) -> float:
    """As the metric of `weighed`, without the shared weight's second name and the mask."""
    kept = [value for name, value in weights.items() if name not in ("second.weight", "mask")]
    return float(torch.stack([value.square().sum() for value in kept]).sum().sqrt())


ENDS = ("epoch_ends", "train_ends")


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(
    ("replicas", "spec"),
    [
        (1, {}),
        (2, {"sharding": "Optimizer"}),
        (2, {"emaDecay": "0.5"}),
        (2, {"evaluateEverySteps": 2, "checkpoint": {"keepBest": {"metric": "length", "mode": "Min"}}}),
        (1, {"onNotFinite": "Skip", "checkpoint": {"everySteps": 3}}),
    ],
    ids=["plain", "sharding", "average", "best", "skip"],
)
def test_what_hooks_do_at_the_end_is_evaluated_saved_and_finished(
    tmp_path: Path, name: str, replicas: int, spec: dict[str, Any]
) -> None:
    ending = Ending(tmp_path, name)
    ran = ending.run(replicas, **spec)
    assert ending.saved == pytest.approx(ran.outcome.metrics["length"], rel=1e-6)
    if "emaDecay" not in spec:
        assert ending.finished == [pytest.approx(ending.saved, rel=1e-6)]
    assert ending.hooks[0].calls >= 1
    if "evaluateEverySteps" in spec:
        assert ending.commit["evaluation"]["length"] == pytest.approx(ending.saved, rel=1e-6)


def test_an_evaluation_that_ends_the_training_is_repeated_if_hooks_change_the_weights_after_it(tmp_path: Path) -> None:
    ending = Ending(tmp_path, "train_ends")
    stop = {"metric": "length", "mode": "Max", "patience": 1, "minDelta": "1000"}
    ran = ending.run(trainSteps=12, evaluateEverySteps=2, stopEarly=stop)
    assert ran.outcome.step == 4
    assert ending.saved == pytest.approx(ran.outcome.metrics["length"], rel=1e-6)
    assert ending.hooks[0].calls == 1
    again = ending.run(attempt=2, trainSteps=12, evaluateEverySteps=2, stopEarly=stop)
    assert (again.outcome.step, again.outcome.metrics["length"]) == (4, ran.outcome.metrics["length"])


@pytest.mark.parametrize("stopped", [False, True], ids=["whole", "stopped"])
def test_the_best_checkpoint_stays_if_hooks_spoil_a_better_one_of_the_step_that_ends_the_training(
    tmp_path: Path, stopped: bool
) -> None:
    ending = Ending(tmp_path, "train_ends", factor=2.0)
    checkpoint = {"uri": str(tmp_path), "keep": 1, "everySteps": 2, "keepBest": {"metric": "length", "mode": "Min"}}
    spec: dict[str, Any] = {
        "trainSteps": 12,
        "evaluateEverySteps": 2,
        "stopEarly": {"metric": "length", "mode": "Max", "patience": 1, "minDelta": "1000"},
        "checkpoint": checkpoint,
    }
    if stopped:
        run(ending.made, stop=Stopping(4), **spec)
    ran = ending.run(attempt=1 + stopped, **spec)
    commits = [json.loads(path.read_text()) for path in tmp_path.glob("*/COMMIT")]
    evaluated = {commit["step"]: commit["evaluation"]["length"] for commit in commits if commit["evaluation"]}
    assert ran.outcome.step == 4
    assert set(evaluated) == {2, 4}
    assert ran.outcome.best["value"] == evaluated[2] < evaluated[4]


def test_an_early_end_that_was_cut_off_is_an_early_end_for_the_hooks_of_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(tmp_path, "")
    stop = {"metric": "length", "mode": "Max", "patience": 1, "minDelta": "1000"}
    spec = {"trainSteps": 12, "evaluateEverySteps": 2, "stopEarly": stop}
    ending.run(**spec)
    # The checkpoint that is written before the hooks of the end.
    start = CheckpointStorage.start
    monkeypatch.setattr(CheckpointStorage, "start", lambda *found: replace(start(*found), ended=False))
    ending.run(attempt=2, **spec)
    assert [hooks.stopped for hooks in ending.hooks] == [[True], [True]]


@pytest.mark.parametrize("name", ENDS)
def test_a_run_with_nothing_left_to_train_does_not_end_the_training_a_second_time(tmp_path: Path, name: str) -> None:
    ending = Ending(tmp_path, name)
    first = ending.run(trainSteps=4)
    saved = ending.saved
    again = ending.run(trainSteps=4, attempt=2)
    assert ending.hooks[1].calls == 0
    assert again.outcome.metrics["length"] == first.outcome.metrics["length"]
    assert ending.saved == saved
    assert ending.finished[0] == ending.finished[1]


def test_a_lower_rung_keeps_the_weights_with_which_the_job_goes_on(tmp_path: Path) -> None:
    ending = Ending(tmp_path, "train_ends")
    ran = ending.run(trainSteps=8, endAfterSteps=4)
    assert ending.saved == pytest.approx(ran.outcome.metrics["length"], rel=1e-6)
    whole = run(lambda hp, rank: weighed(hp), trainSteps=4, schedule={"name": "Constant"})
    assert ending.saved == pytest.approx(whole.outcome.metrics["length"], rel=1e-6)


def test_a_last_evaluation_that_fails_loses_no_step(tmp_path: Path) -> None:
    def made(hp: Hyperparameters, rank: int) -> Task:
        task = weighed(hp)
        calls = 0

        def failing(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ValueError("no such column")
            assert task.metrics is not None
            return dict(task.metrics(model, batch))

        return replace(task, metrics=failing, hooks=Scaling(task.model, "train_ends"))

    ran = run(made, trainSteps=6, checkpoint={"uri": str(tmp_path), "keep": 1})
    assert ran.outcome.code is ExitCode.UserError
    (commit,) = tmp_path.glob("*/COMMIT")
    assert json.loads(commit.read_text())["step"] == 6


def test_the_checksum_of_the_last_weights_is_in_the_commit_and_that_of_the_same_weights_is_the_same(
    tmp_path: Path,
) -> None:
    plain, halved = Ending(tmp_path / "plain", ""), Ending(tmp_path / "halved", "train_ends")
    again = Ending(tmp_path / "again", "train_ends")
    for each in (plain, halved):
        each.run()
    again.run(2, sharding="Optimizer", trainSteps=6)
    sums = [each.commit["weights"] for each in (plain, halved)]
    assert sums[0] != sums[1]
    halved.run(attempt=2)
    assert halved.commit["weights"] == sums[1]


def test_weights_that_change_after_the_last_evaluation_are_a_finding(tmp_path: Path) -> None:
    ending = Ending(tmp_path, "evaluation_ends")
    ran = ending.run()
    assert any("after the last evaluation" in text for text in ran.warnings)
    assert ending.finished == [pytest.approx(ending.saved, rel=1e-6)]


def modules(directory: Path, name: str, attempt: int = 1, **spec: Any) -> tuple[in_process.Run, dict[str, Tensor]]:
    """A run of one of the zoo's modules, and what its newest checkpoint has."""
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": attempt}
    checkpoint = {"uri": str(directory / "kept"), "keep": 1}
    done = in_process.run(lightning_spec(name, job=job, checkpoint=checkpoint, **spec), directory)
    assert done.outcome.code is ExitCode.Succeeded, done.outcome.message
    newest = max(path.parent for path in (directory / "kept").glob("step-*/COMMIT"))
    return done, load_file(newest / "model.safetensors")


def held_out_loss(weights: Mapping[str, Tensor]) -> float:
    features, target = zip(*lightning_zoo.HELD_OUT, strict=True)
    found = nn.functional.linear(torch.stack(features), weights["layer.weight"], weights["layer.bias"])
    return float(nn.functional.mse_loss(found, torch.stack(target)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Halved", "HalvedByEpoch", "halved", "halved_by_epoch", "pruned"])
def test_what_a_module_or_callback_does_at_the_end_is_evaluated_and_saved_under_both_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made: list[nn.Module] = []
    setup = lightning_zoo.Plain.setup
    monkeypatch.setattr(lightning_zoo.Plain, "setup", lambda self, stage: (made.append(self), setup(self, stage)))
    done, weights = modules(tmp_path, name)
    left = made[-1].state_dict()
    assert all(torch.equal(weights[key], left[key]) for key in weights)
    assert held_out_loss(weights) == pytest.approx(done.outcome.metrics["val_loss"], rel=1e-5)
    again, same = modules(tmp_path, name, attempt=2)
    assert again.outcome.metrics["val_loss"] == pytest.approx(done.outcome.metrics["val_loss"], rel=1e-6)
    assert all(torch.equal(weights[key], same[key]) for key in weights)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Halved", "halved", "Gan"])
def test_a_run_without_checkpoints_leaves_its_weights_at_the_desk_under_both_loops(tmp_path: Path, name: str) -> None:
    done = in_process.run(lightning_spec(name), tmp_path, report=tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert held_out_loss(weights) == pytest.approx(done.outcome.metrics["val_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["Plain", "Gan"])
def test_weights_that_do_not_fit_are_left_out_with_a_warning(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors.part").symlink_to("/dev/full")
    done = in_process.run(lightning_spec(name), tmp_path, report=tmp_path)
    assert done.outcome.code is ExitCode.Succeeded
    assert not (tmp_path / "model.safetensors").exists()
    assert re.search("warning: Weights: the weights were not kept: .*No space left", capfd.readouterr().err)


def halving(hp: Hyperparameters) -> Task:
    task = weighed(hp)
    return replace(task, hooks=Scaling(task.model, "train_ends"))


def test_on_chips_the_weights_of_the_end_are_evaluated_and_saved_too(launcher: Launcher, tmp_path: Path) -> None:
    checkpoint = {"uri": str(tmp_path / "kept"), "keep": 1}
    entrypoint = "tests.trainer.doctor.test_last_weights:halving"
    gang = start_replicas(launcher, "chips", 2, trainSteps=6, checkpoint=checkpoint, entrypoint=entrypoint)
    assert set(gang.wait()) == {ExitCode.Succeeded}, gang.output()
    (commit,) = tmp_path.rglob("COMMIT")
    saved = length(load_file(commit.parent / "model.safetensors"))
    assert saved == pytest.approx(gang.hosts[0].message()["metrics"]["length"], rel=1e-5)
    assert json.loads(commit.read_text())["weights"] in gang.hosts[0].output


class Remembering(nn.Linear):
    """A layer whose state is not only tensors, as of libraries that quantize."""

    def get_extra_state(self) -> dict[str, str]:
        return {"kind": "linear"}

    def set_extra_state(self, state: Any) -> None:
        """Nothing in it is needed."""


def test_a_run_without_checkpoints_trains_a_model_whose_state_is_not_only_tensors() -> None:
    def made(hp: Hyperparameters, rank: int) -> Task:
        task = weighed(hp)
        task.model.add_module("remembering", Remembering(1, 1))
        return task

    ran = run(made, trainSteps=2, evaluateEverySteps=1)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
