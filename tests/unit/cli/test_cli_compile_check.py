"""`tpujob compile-check`: what it says of the trainer's answer, and how it ends. `tests/aot` has the answers."""

import copy
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from tests.cluster.deadlines import deadline
from tests.unit.jobs import job_body
from tpu_training_operator.cli.code import option
from tpu_training_operator.cli.common.errors import CommandError
from tpu_training_operator.cli.compile import compile_check
from tpu_training_operator.cli.main import main

GIB = 1 << 30

ANSWER: dict[str, Any] = {
    "generation": "v5e",
    "topology": "4x4",
    "replicas": 16,
    "device": "TPU v5 lite",
    "batch": {"global": 128, "perReplica": 8, "accumulation": 1},
    "precision": "Float32",
    "versions": {"torchXla": "2.9.0", "libtpu": "0.0.21"},
    "found": [],
    "parameters": 1000,
    "fits": True,
    "memory": {
        "arguments": 3 * GIB,
        "temporaries": 4 * GIB,
        "results": 2 * GIB,
        "inPlace": 2 * GIB,
        "code": 0,
        "batchesAhead": GIB // 2,
        "needed": 7 * GIB + GIB // 2,
        "limit": 15 * GIB,
    },
    "step": {
        "modelFlops": 197 * 10**10,
        "wideFlops": 197 * 10**10,
        "flops": 197 * 10**10,
        "traffic": 819 * 10**6,
        "exchanged": {"all-reduce": 10**8},
        "waited": {"all-reduce": 10**8},
        "waitedTraffic": 0,
        "collectives": [{"kind": "all-reduce", "bytes": 10**8, "after": 0.75, "waits": True, "traffic": 0}],
    },
    "padding": {
        "tensors": [],
        "products": [
            {"name": "middle.weight", "shape": [100, 512], "computed": [128, 512], "waste": 0.2188},
            # No task can have more classes.
            {"name": "head.weight", "shape": [1, 512], "computed": [128, 512], "waste": 0.9922},
        ],
    },
}

DOES_NOT_FIT = {
    "fits": False,
    "refusal": "RESOURCE_EXHAUSTED: Used 16.38G of 15.75G hbm.",
    "memory": {"limit": 15 * GIB, "needed": 16 * GIB},
    "largestBatch": {"fits": 64, "refused": 72},
}

Answers = dict[str, dict[str, Any]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """By accelerator type; the trainer's process is not started."""
    by_slice: Answers = {}

    def ask(file: object, resolution: Any, *_: object, **__: object) -> dict[str, Any]:
        return by_slice.get(str(resolution.layout), copy.deepcopy(ANSWER))

    monkeypatch.setattr(compile_check, "ask", ask)
    monkeypatch.setattr(option, "find_problem", lambda *_: None)
    return by_slice


def checked(*arguments: str, changes: dict[str, Any] | None = None) -> Result:
    text = yaml.safe_dump(job_body(changes))
    return CliRunner().invoke(main, ["compile-check", "-f", "-", *arguments], input=text)


def refused() -> dict[str, Any]:
    kept = {name: value for name, value in ANSWER.items() if name not in ("step", "padding")}
    return {**kept, **DOES_NOT_FIT}


def test_a_step_that_fits_is_told_with_its_method_and_its_bound(answers: Answers, snapshot: SnapshotAssertion) -> None:
    result = checked()
    assert result.exit_code == 0, result.output
    for number in (
        "7.50 GiB of 15.00 GiB",
        "arithmetic 10 ms",
        "exchange 1.25 ms",
        "100 MB after 75%",
        "11.2 ms",
        "12.2 ms",
        "22%",
    ):
        assert number in result.stdout
    assert result.stdout == snapshot


def test_a_batch_that_does_not_fit_ends_with_one_that_does_and_status_1(
    answers: Answers, snapshot: SnapshotAssertion
) -> None:
    answers["v5litepod-16"] = refused()
    result = checked()
    assert result.exit_code == 1
    for number in ("16.00 GiB of 15.00 GiB", "64 (72 does not fit)", "1024 per slice", "16.38G of 15.75G"):
        assert number in result.stdout
    assert result.stdout == snapshot


def test_what_is_no_fixed_program_is_told_with_its_line(answers: Answers, snapshot: SnapshotAssertion) -> None:
    found = {"kind": "DynamicShape", "operation": "aten::nonzero", "where": "mine.py:7", "shapes": "bool[8]"}
    answers["v5litepod-16"] = {**refused(), "fits": None, "memory": {}, "refusal": None, "found": [found]}
    del answers["v5litepod-16"]["refusal"], answers["v5litepod-16"]["largestBatch"]
    result = checked()
    assert result.exit_code == 1
    assert "mine.py:7: aten::nonzero" in result.stdout
    assert result.stdout == snapshot


def test_json_has_the_answer_and_the_bound(answers: Answers) -> None:
    document = json.loads(checked("-o", "json").stdout)
    assert document["slice"] == "v5litepod-16"
    assert document["memory"] == ANSWER["memory"]
    # 10 ms of arithmetic, and the exchange that waits: 1.875e8 bytes over three quarters of 200 GB/s.
    assert document["atBest"]["stepSeconds"] == pytest.approx(0.01125)
    assert document["atBest"]["boundBy"] == "arithmetic"


def test_what_goes_on_is_told_on_stderr_but_not_beside_json(answers: Answers, snapshot: SnapshotAssertion) -> None:
    assert checked().stderr == snapshot
    assert checked("-o", "json").stderr == ""


def test_slices_are_compared_in_steps_and_chip_hours(answers: Answers) -> None:
    answers["v5litepod-64"] = refused()
    result = checked("--compare", "v5litepod-16,v5litepod-64")
    assert result.exit_code == 1
    (sixteen,) = (line for line in result.stdout.splitlines() if "v5litepod-16 " in line)
    (more,) = (line for line in result.stdout.splitlines() if "v5litepod-64 " in line)
    assert " yes " in sixteen
    assert " 88.9 " in sixteen
    assert "no, 64 does" in more
    assert len(json.loads(checked("--compare", "v5litepod-16,v5litepod-64", "-o", "json").stdout)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.trainer.backend": "XLASPMD"},
        {"spec.trainer": {"image": "a", "command": ["python"]}},
    ],
    ids=str,
)
def test_what_has_no_step_of_the_trainers_is_refused(
    answers: Answers, changes: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    result = checked(changes=changes)
    assert result.exit_code == 2
    assert result.stderr == snapshot


def test_a_trainer_without_an_answer_is_an_error_in_one_line(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ask(*_: object, **__: object) -> dict[str, Any]:
        raise CommandError("the check needs jax")

    monkeypatch.setattr(compile_check, "ask", ask)
    result = checked()
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith("the check needs jax")


def test_a_replica_of_one_slice_stands_for_several_and_the_bound_has_the_network_between_them(answers: Answers) -> None:
    result = checked(changes={"spec.trainer.backend": "XLASPMD", "spec.slice.count": 2})
    assert result.exit_code == 0, result.output
    assert "an estimate: the 2 slices run a program of backend XLASPMD, which is not traced" in result.stdout
    # 1.25 ms inside a slice, and 100 MB over 16 chips of 25 Gbit/s.
    assert "exchange 3.25 ms" in result.stdout


def test_an_answer_that_was_kept_is_told(answers: Answers) -> None:
    answers["v5litepod-16"] = ANSWER | {"kept": True}
    assert "the compiler's answer is that of an earlier check" in checked().stdout


ELSEWHERE = [{"slice": {"acceleratorType": name}, "waitForPreviousSeconds": 60} for name in ("v5litepod-32", "v6e-16")]
MOVES = {"spec.placement": {"alternatives": ELSEWHERE}}


def test_each_alternative_has_a_verdict(answers: Answers) -> None:
    answers["v6e-16"] = refused()
    result = checked(changes=MOVES)
    assert result.exit_code == 1
    *_, fitting, refusal, _, _ = result.stdout.splitlines()
    assert fitting.startswith("v5litepod-32, ")
    assert "7.50 GiB of 15.00 GiB" in fitting
    assert refusal.startswith("v6e-16, ")
    assert "16.00 GiB of 15.00 GiB" in refusal
    document = json.loads(checked("-o", "json", changes=MOVES).stdout)
    assert [one["slice"] for one in document["alternatives"]] == ["v5litepod-32", "v6e-16"]


CODE = {"spec.trainer.code": {"uri": "secret://code", "sha256": "0" * 64}}


def test_code_in_a_cluster_is_asked_for_as_a_folder(
    answers: Answers, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    result = checked(changes=CODE)
    assert result.exit_code == 2
    assert "spec.trainer.code.uri" in result.stderr
    assert result.stderr == snapshot
    assert checked("--code", str(tmp_path), changes=CODE).exit_code == 0


# In `tpujob plan`.


def planned(tmp_path: Path, text: str, *arguments: str, changes: dict[str, Any] | None = None) -> Result:
    file = tmp_path / "compiled.json"
    file.write_text(text)
    options = ["plan", "-f", "-", "--compile-results", str(file), *arguments]
    return CliRunner().invoke(main, options, input=yaml.safe_dump(job_body(changes)))


def test_a_plan_shows_what_was_compiled_beside_its_numbers(answers: Answers, tmp_path: Path) -> None:
    shown = planned(tmp_path, checked("-o", "json").stdout).stdout.splitlines()
    (memory,) = (line for line in shown if " HBM " in line)
    assert "7.50 GiB of 15.00 GiB" in memory
    assert "fits; compiled, not run" in memory
    (best,) = (line for line in shown if "step at best" in line)
    assert "11.2 ms (12.2 ms without overlap)" in best
    assert "89%" in best


def test_plans_side_by_side_have_a_column_for_each_slice_that_was_compiled(answers: Answers, tmp_path: Path) -> None:
    answers["v5litepod-64"] = {**refused(), "batch": {"global": 512, "perReplica": 8, "accumulation": 1}}
    types = "v5litepod-16,v5litepod-64"
    compiled = checked("--compare", types, "-o", "json").stdout
    shown = planned(tmp_path, compiled, "--compare", f"{types},v5litepod-32").stdout
    (verdicts,) = (line.split() for line in shown.splitlines() if line.startswith("│ compiled"))
    assert " ".join(verdicts).count("fit") == 2
    assert verdicts[-2] == "no"
    (memory,) = (line for line in shown.splitlines() if " HBM " in line)
    assert "7.50 GiB of 15.00 GiB" in memory
    assert "16.00 GiB of 15.00 GiB" in memory


def test_the_hours_at_best_follow_from_what_was_compiled_but_a_step_that_does_not_fit_has_none(
    answers: Answers, tmp_path: Path
) -> None:
    answers["v5litepod-64"] = {**refused(), "batch": {"global": 512, "perReplica": 8, "accumulation": 1}}
    types = "v5litepod-16,v5litepod-64"
    compiled = checked("--compare", types, "-o", "json").stdout
    options = ("--compare", f"{types},v5litepod-32,v6e-16", "-o", "json")
    at_best = [column["cost"] for column in json.loads(planned(tmp_path, compiled, *options).stdout)]
    assert [cost.get("stepSeconds") for cost in at_best] == [pytest.approx(0.01125), None, pytest.approx(0.01125), None]
    assert at_best[0]["stepSecondsFrom"].startswith("at best, compiled for v5litepod-16: ")
    # A measurement goes before all bounds.
    measured = json.loads(planned(tmp_path, compiled, *options, "--step-seconds", "0.5@v6e-16").stdout)
    assert [column["cost"].get("stepSeconds") for column in measured] == [None, None, None, 0.5]


def test_a_plan_shows_its_alternatives_as_compiled(answers: Answers, tmp_path: Path) -> None:
    answers["v6e-16"] = refused()
    shown = planned(tmp_path, checked("-o", "json", changes=MOVES).stdout, changes=MOVES).stdout
    assert "does not fit: 16.00 GiB of" in " ".join(shown.replace("│", " ").split())


def test_another_batch_than_the_one_that_was_compiled_is_warned_of(
    answers: Answers, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    other = {**copy.deepcopy(ANSWER), "batch": {"global": 64, "perReplica": 4, "accumulation": 1}}
    result = planned(tmp_path, json.dumps({"slice": "v5litepod-16", **other}))
    assert result.stdout.splitlines()[-1] == snapshot


def test_a_file_with_something_else_is_no_traceback(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts = ["", "{", "3", "null", "[3]", "{}", '{"slice": 1, "fits": 3, "batch": 2}', "[" * 100_000]
    results = [planned(tmp_path, text) for text in texts]
    assert {result.exit_code for result in results} == {2}
    [message] = {result.stderr for result in results}
    assert message == snapshot


@pytest.mark.parametrize("named", ["", "relative"])
@pytest.mark.parametrize("has_home", [True, False])
def test_the_compilers_answers_are_kept_below_the_users_home_if_there_is_one(
    named: str, has_home: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    if not has_home:
        monkeypatch.delenv("HOME")
        # As for a user id that the image does not know.
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert compile_check._cache_folder() == (tmp_path / ".cache/tpujob/compiled" if has_home else None)


def test_a_check_that_is_stopped_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    compiles, job, scratch, trainer = (tmp_path / name for name in ("compiles", "job.yaml", "scratch", "python"))
    os.mkfifo(compiles)
    scratch.mkdir()
    job.write_text(yaml.safe_dump(job_body()))
    trainer.write_text(f"#!/bin/sh\necho $$ >{compiles}\nexec sleep 1000\n")
    trainer.chmod(0o755)
    program = f"""
import sys
from tpu_training_operator.cli.code import option
from tpu_training_operator.cli.main import main
option.find_problem = lambda *_: None
sys.executable = {str(trainer)!r}
main(["compile-check", "-f", {str(job)!r}])
"""
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(scratch)}) as process:
        compiler = os.pidfd_open(int(compiles.read_text()))
        assert [*scratch.iterdir()]
        process.terminate()
        assert process.wait(deadline(60)) == 128 + signal.SIGTERM
    # Readable once the process has ended, whether or not anything has waited for it.
    assert select.select([compiler], [], [], deadline(60))[0]
    os.close(compiler)
    assert not [*scratch.iterdir()]
