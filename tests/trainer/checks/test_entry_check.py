"""The entry check: replica 0 of the slice, on one CPU, for two steps."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import tasks
from tests.trainer.gang_processes import DEADLINE, ON_XLAS_CPU, ROOT, Launcher, run_spec
from tests.trainer.worker.test_archive import file, packed
from tests.trainer.worker.test_code import code_of
from tests.wheels import write_wheel
from tpu_contract.protocol import ENV_PACKAGES_SHA256, ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.checks.entry.check import run_check
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.optim.followed_rate import FollowedRate

SEEN: list[Any] = []


def check(folder: Path, entrypoint: str, **changes: Any) -> Outcome:
    """Of a job with 4 hosts and 8 replicas, in this process."""
    torch.set_num_threads(1)
    SEEN.clear()
    document = run_spec(hosts=4, entrypoint=f"tests.trainer.{entrypoint}", **changes)
    file = folder / "run.json"
    file.write_text(json.dumps(document))
    environ = {"TPUJOB_RUN_SPEC": str(file), "TPUJOB_NUM_HOSTS": "4", "TPUJOB_HOST_INDEX": "0"}
    return run_check({**environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, StopSignal())


def watched(hp: Hyperparameters) -> Task:
    task = tasks.small(hp)
    SEEN.append((hp.global_batch_size, hp.per_replica_batch_size, hp.train_steps))

    def loss(model: Any, batch: Any) -> Any:
        SEEN.append(len(batch[0]))
        return tasks.loss(model, batch)

    return Task(model=task.model, train=task.train, loss=loss, finish=lambda model: SEEN.append("finish"))


def misspelt(hp: Hyperparameters) -> Task:
    def loss(model: Any, batch: Any) -> Any:
        return model(batch[0]).meen()

    return Task(model=tasks.small(hp).model, train=tasks.small(hp).train, loss=loss)


def broken_metric(hp: Hyperparameters) -> Task:
    return Task(
        model=tasks.small(hp).model,
        train=tasks.small(hp).train,
        loss=tasks.loss,
        evaluation=tasks.examples(),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmx(dim=1)},
    )


def not_finite(hp: Hyperparameters) -> Task:
    def loss(model: Any, batch: Any) -> Any:
        return tasks.loss(model, batch) * float("nan")

    return Task(model=tasks.small(hp).model, train=tasks.small(hp).train, loss=loss)


def leaves(hp: Hyperparameters) -> Task:
    raise SystemExit(0)


def test_the_task_gets_the_numbers_of_the_slice_and_makes_two_steps_of_one_replica(tmp_path: Path) -> None:
    outcome = check(tmp_path, "checks.test_entry_check:watched")
    assert (outcome.code, outcome.step) == (ExitCode.Succeeded, 2), outcome.message
    assert "trainer.checks.test_entry_check" in outcome.message
    assert "2 steps" in outcome.message
    assert SEEN == [(16, 2, 24), 2, 2]


def test_a_job_of_one_step_makes_one(tmp_path: Path) -> None:
    outcome = check(tmp_path, "tasks:small", trainSteps=1, warmupSteps=0)
    assert (outcome.code, outcome.step) == (ExitCode.Succeeded, 1)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_has_all_its_passes(tmp_path: Path, accumulation: int) -> None:
    batch = {"global": 16 * accumulation, "perReplica": 2, "accumulation": accumulation}
    outcome = check(tmp_path, "checks.test_entry_check:watched", batch=batch)
    assert outcome.code is ExitCode.Succeeded
    assert SEEN[1:] == [2] * 2 * accumulation


@pytest.mark.parametrize(
    ("entrypoint", "code", "said"),
    [
        ("checks.test_entry_check:misspelt", ExitCode.UserError, "'Tensor' object has no"),
        ("checks.test_entry_check:broken_metric", ExitCode.UserError, "argmx"),
        ("checks.test_entry_check:leaves", ExitCode.UserError, "SystemExit"),
        ("checks.test_entry_check:not_finite", ExitCode.NotFinite, "not finite"),
        ("checks.test_entry_check:nowhere", ExitCode.UserError, "nowhere"),
        ("checks.test_entry_chekc:task", ExitCode.UserError, "test_entry_chekc"),
    ],
)
def test_an_error_of_the_users_is_told_as_in_a_run(tmp_path: Path, entrypoint: str, code: ExitCode, said: str) -> None:
    outcome = check(tmp_path, entrypoint)
    assert outcome.code is code
    assert said in outcome.message


@pytest.mark.skipif(find_spec("jax") is None, reason="this stack has no jax")
def test_a_kernel_that_only_a_tpu_can_run_is_not_an_error_of_the_users(launcher: Launcher, tmp_path: Path) -> None:
    said = launcher.run_alone("tests.trainer.checks.kernel_check", TEST_FOLDER=str(tmp_path))
    code, step, message = json.loads(said.splitlines()[-1])
    assert (code, step) == (ExitCode.Succeeded, None), message
    assert "which only a TPU can run" in message


def test_the_error_names_file_and_line(tmp_path: Path) -> None:
    assert f'File "{__file__}", line' in check(tmp_path, "checks.test_entry_check:misspelt").message


def own_rates(which: str, hp: Hyperparameters) -> Task:
    """A task that builds its optimizer in one of the usual ways."""
    small, given = tasks.small(hp), hp.learning_rate

    def build(parameters: Any, hp: Hyperparameters) -> torch.optim.Optimizer:
        head, body = parameters[:1], parameters[1:]
        rate = given if "closure" in which else hp.learning_rate
        other = {"fixed": 0.02, "multiple": rate / 10, "derived": 1 - (1 - rate) ** 2}[which.split()[-1]]
        return torch.optim.SGD([{"params": body, "lr": rate}, {"params": head, "lr": other}], lr=1.0)

    return replace(small, optimizer=build)


def long_cosine(hp: Hyperparameters) -> Task:
    def schedule(optimizer: Any, hp: Hyperparameters) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1200)

    return replace(tasks.small(hp), scheduler=schedule)


@pytest.mark.parametrize(
    ("which", "warns"),
    [
        ("own fixed", True),
        ("closure fixed", True),
        ("own multiple", False),
        ("closure multiple", False),
        ("closure derived", False),
    ],
)
def test_a_group_that_does_not_follow_the_recipes_rate_is_named(tmp_path: Path, which: str, warns: bool) -> None:
    outcome = check(tmp_path, "checks.test_entry_check:own_rates", parameters={"which": which})
    assert outcome.code is ExitCode.Succeeded, outcome.message
    named = "parameter group 1 of the task's SGD keeps the rate 0.02 on every slice, and group 0 follows the recipe's"
    assert (named in outcome.message) == warns
    assert ("keeps the rate" in outcome.message) == warns


def test_a_scheduler_of_another_length_is_named_with_both_numbers(tmp_path: Path) -> None:
    outcome = check(tmp_path, "checks.test_entry_check:long_cosine", trainSteps=10)
    assert "warning: CosineAnnealingLR is built for 1200 steps (T_max), and this run steps it 10" in outcome.message


def test_what_is_computed_from_a_followed_rate_is_the_same_number() -> None:
    rate = FollowedRate(0.3)
    for computed, plain in (
        (rate * 2, 0.6),
        (3 / rate, 3 / 0.3),
        (1 - rate, 0.7),
        (rate**0.5, 0.3**0.5),
        (-1 + rate, -0.7),
    ):
        assert isinstance(computed, FollowedRate)
        assert computed == plain
    assert type(copy.deepcopy(rate)) is type(pickle.loads(pickle.dumps(rate))) is float
    assert json.dumps(rate) == "0.3"


def test_nothing_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    places = {"checkpoint": {"uri": str(kept), "everySteps": 1, "keep": 3}, "report": {"uri": str(kept)}}
    assert check(tmp_path, "tasks:small", **places).code is ExitCode.Succeeded
    assert not kept.exists()


def test_a_wrong_run_spec_is_told(tmp_path: Path) -> None:
    outcome = check(tmp_path, "tasks:small", unheard=1)
    assert outcome.code is ExitCode.BadSpec
    assert "unheard: unknown field" in outcome.message


def ended(folder: Path, document: dict[str, Any], **more: str) -> dict[str, Any]:
    """The last words of the real command, as in the pod: on a machine where none of the peers is."""
    (folder / "run.json").write_text(json.dumps(document))
    words = folder / "words"
    env = {
        **os.environ,
        **ON_XLAS_CPU,
        "TPUJOB_RUN_SPEC": str(folder / "run.json"),
        "TPUJOB_NUM_HOSTS": "4",
        "TPUJOB_HOST_INDEX": "0",
        "MASTER_ADDR": "nobody.is.there",
        "MASTER_PORT": "12355",
        "TPUJOB_TERMINATION_LOG": str(words),
        **more,
    }
    command = [sys.executable, "-m", "tpu_trainer", "entry-check"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(words.read_text())
    return said


def test_the_real_command_checks_a_slice_of_tpus_on_xlas_cpu_device(tmp_path: Path) -> None:
    document = run_spec(hosts=4, backend="xla", hardware="TPU", entrypoint="tests.trainer.tasks:small")
    said = ended(tmp_path, document)
    assert (said["outcome"], said["step"]) == ("Succeeded", 2)


def test_code_and_packages_that_the_job_brings_are_checked_and_not_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = b"import tiny_rates\n\ndef task(hp):\n    raise ValueError(f'brought {tiny_rates.VERSION}')\n"
    wheel = write_wheel(tmp_path)
    files = {"brought.py": code, "requirements.txt": b"tiny-rates", f"wheels/{wheel.name}": wheel.read_bytes()}
    archive = packed(*(file(*one) for one in files.items()))
    (tmp_path / "code.tar.gz").write_bytes(archive)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, value in (("TPUJOB_CODE_DIRECTORY", str(tmp_path / "place")), ("PYTHONPATH", "")):
        monkeypatch.setenv(name, value)
    # The check changes them.
    for name in ("PATH", ENV_PACKAGES_SHA256):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    document = run_spec(entrypoint="brought:task", code=code_of(archive, str(tmp_path / "code.tar.gz")))
    (tmp_path / "run.json").write_text(json.dumps(document))
    outcome = run_check({**os.environ, "TPUJOB_RUN_SPEC": str(tmp_path / "run.json")}, StopSignal())
    assert outcome.code is ExitCode.UserError
    assert "ValueError: brought 1.2" in outcome.message
