"""The parts of `compile-check` that need no compiler: the search, and reading a scheduled program."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.trainer.gang_processes import run_spec
from tpu_trainer.checks.compile import check, command, pod
from tpu_trainer.checks.compile.hlo import Array, Collective, read
from tpu_trainer.checks.compile.search import MANY, MOST, PRECISION, ROWS, Largest, Need, largest
from tpu_trainer.contract.outcome import Outcome, termination_message
from tpu_trainer.contract.protocol import TERMINATION_MESSAGE_LIMIT, ExitCode

if TYPE_CHECKING:
    from pathlib import Path


@given(
    border=st.integers(0, MOST),
    begin=st.integers(1, 1 << 14),
    fixed=st.integers(0, 1000),
    told=st.booleans(),
)
def test_the_border_is_found_in_few_questions(border: int, begin: int, fixed: int, told: bool) -> None:
    asked: list[int] = []

    def ask(size: int) -> Need:
        asked.append(size)
        return Need(size <= border, fixed + 10 * size if told else None)

    found = largest(ask, begin, fixed + 10 * border + 5, fixed)
    assert found.fits <= border
    assert found.refused is None or found.refused > border
    assert found.fits == 0 or found.fits in asked
    if found.refused is None:
        assert found.fits >= MOST - max(ROWS, MOST // PRECISION)
    else:
        assert found.refused - found.fits <= max(ROWS if found.fits >= MANY else 1, found.fits // PRECISION)
    assert len(asked) == len(set(asked)) < 45


def test_memory_that_grows_evenly_takes_three_compilations() -> None:
    asked: list[int] = []

    def ask(size: int) -> Need:
        asked.append(size)
        return Need(size <= 100, 1000 + 50 * size)

    assert largest(ask, 8, 6049, 1000).fits == 96
    assert asked == [8, 96, 104]


def test_each_try_of_the_search_is_told_with_its_bounds(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    gib = 2**30

    def measure(spec: Any, examples: int | None, limit: int | None) -> dict[str, Any]:
        needed = (10 + 2 * spec["batch"]["perReplica"]) * gib
        return {"fits": needed <= 39 * gib, "memory": {"needed": needed, "limit": 39 * gib, "inPlace": 10 * gib}}

    monkeypatch.setattr(check, "missing", lambda: None)
    monkeypatch.setattr(check, "_measure", measure)
    said: list[str] = []
    spec = run_spec(batch={"global": 8, "perReplica": 4, "accumulation": 1}, replicas=2)
    answer = check.check(spec, find_largest=True, say=said.append)
    assert answer["largestBatch"] == {"fits": 14, "refused": 15}
    assert "18.00 of 39" in str(said)
    assert "14" in str(said)
    assert "38.00 of 39" in str(said)
    assert said == snapshot


def test_a_search_that_cannot_go_on_leaves_the_answer_about_the_jobs_own_batch(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    refusal = {"fits": False, "memory": {"needed": 50, "limit": 40, "inPlace": 10}}

    def measure(spec: Any, examples: int | None, limit: int | None) -> dict[str, Any]:
        if spec["batch"]["perReplica"] != 4:
            raise check.CannotCheckError("tracing ended with Killed, as when memory is short", "Ended")
        return refusal

    monkeypatch.setattr(check, "missing", lambda: None)
    monkeypatch.setattr(check, "_measure", measure)
    said: list[str] = []
    spec = run_spec(batch={"global": 8, "perReplica": 4, "accumulation": 1}, replicas=2)
    assert check.check(spec, say=said.append) == refusal
    assert said[-1] == snapshot


def test_the_command_tells_its_tries_beside_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(document: Any, **given: Any) -> dict[str, Any]:
        given["say"]("trying")
        return {"fits": True}

    monkeypatch.setattr(command, "check", told)
    (tmp_path / "run.json").write_text("{}")
    given = ["--run-spec", str(tmp_path / "run.json")]
    assert command.main(given) == command.FITS
    assert capsys.readouterr() == ('{\n "fits": true\n}\n', "trying\n")
    assert command.main([*given, "--output", str(tmp_path / "answer.json")]) == command.FITS
    assert capsys.readouterr() == ("trying\n", "")


def test_few_examples_are_told_exactly() -> None:
    asked: list[int] = []

    def ask(size: int) -> Need:
        asked.append(size)
        return Need(size <= 13, 1000 + 50 * size)

    assert largest(ask, 4, 1699, 1000) == Largest(13, 14)
    assert asked == [4, 13, 14]


PROGRAM = """HloModule jit, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (p: f32[16,10], q: bf16[10,300]) -> f32[16,300] {
  %p = f32[16,10]{1,0:T(8,128)} parameter(0)
  %q = bf16[10,300]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = f32[16,300]{1,0:T(8,128)} convolution(%p, %q), dim_labels=bf_io->bf
}

ENTRY %main (x: f32[16,10], w: bf16[10,300]) -> (f32[16,300]) {
  %w = bf16[10,300]{1,0:T(8,128)(2,1)} parameter(1)
  %x = f32[16,10]{0,1:T(8,128)} parameter(0)
  %near = f32[16,10]{1,0:T(8,128)S(1)} copy(%x)
  %y = f32[16,300]{1,0:T(8,128)} fusion(%near, %w), kind=kOutput, calls=%fused, backend_config={"a":"b(c"}
  %all-reduce = f32[16,300]{1,0:T(8,128)} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  %z = f32[16,300]{1,0:T(8,128)} fusion(%near, %w), kind=kOutput, calls=%fused
  ROOT %t = (f32[16,300]{1,0:T(8,128)}, f32[16,300]{1,0:T(8,128)}) tuple(%all-reduce, %z)
}
"""


def test_a_schedule_is_read() -> None:
    scheduled = read(PROGRAM)
    # x lies with its rows along the wide side: 10 are filled up to 16, and 16 to 128.
    assert scheduled.parameters == [
        Array(640, 16 * 128 * 4, True, (16, 10)),
        Array(6000, 16 * 384 * 2, True, (10, 300)),
    ]
    assert scheduled.collectives == [Collective("all-reduce", 16 * 300 * 4, 0.5)]
    assert scheduled.order == ["matmul", "sum", "matmul"]
    x, w, y = 16 * 128 * 4, 16 * 384 * 2, 16 * 384 * 4
    # The copy reads x and writes to the core; each product reads w and writes; the sum does both.
    assert scheduled.traffic == x + 2 * (w + y) + 2 * y


def test_what_is_missing_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.util, "find_spec", lambda name: None if name == "jax" else object())
    said = check.missing()
    assert said is not None
    assert said.startswith("the check needs jax, which ")
    assert "tpu-training-operator[aot]" in said


@pytest.mark.parametrize("text", ["not JSON", "[]", "{}", '{"slice": 3}'])
def test_a_broken_run_spec_is_no_traceback(text: str, tmp_path: Path) -> None:
    spec, answer = tmp_path / "spec.json", tmp_path / "answer.json"
    spec.write_text(text)
    assert command.main(["--run-spec", str(spec), "--output", str(answer)]) == command.CANNOT_SAY
    assert json.loads(answer.read_bytes())["kind"] in ("BadSpec", "Missing")


# In the entry check's pod.

ANSWER = {
    "fits": False,
    "batch": {"perReplica": 64},
    "replicas": 4,
    "memory": {"needed": 20, "limit": 16},
    "found": [],
    "refusal": "RESOURCE_EXHAUSTED: no room",
}
# What is called as the compile check: $7 is where its answer goes.
PROGRAMS = {
    "crashes": "kill -SEGV $$",
    "is killed": "kill -KILL $$",
    "leaves nothing": "exit 3",
    "hangs": "exec sleep 1000",
    "searches on": f"echo '{json.dumps(ANSWER)}' >$7; exec sleep 1000",
}


@pytest.mark.parametrize(
    ("program", "seconds", "expected"),
    [
        ("crashes", 60, {"trouble": "Ended", "said": "the check ended with Segmentation fault, without an answer"}),
        ("is killed", 60, {"trouble": "Ended", "said": "the check ended with Killed, without an answer"}),
        ("leaves nothing", 60, {"trouble": "Ended", "said": "the check ended with code 3, without an answer"}),
        ("hangs", 0, {"trouble": "TooSlow"}),
        ("searches on", 2, {"fits": False, "perReplica": 64, "replicas": 4, "needed": 20, "limit": 16}),
    ],
)
def test_however_compiling_ends_the_pod_has_words_for_it(
    program: str, seconds: float, expected: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, spec = tmp_path / "python", tmp_path / "run.json"
    script.write_text(f"#!/bin/sh\n{PROGRAMS[program]}\n")
    script.chmod(0o755)
    spec.write_text(json.dumps(run_spec(entrypoint="a:task")))
    monkeypatch.setattr(sys, "executable", str(script))
    found = pod._check(spec, time.monotonic() + seconds, lambda: False)
    assert found.pop("slice")
    assert found == expected


def test_a_pod_that_is_stopped_says_that_it_has_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "run.json"
    spec.write_text(json.dumps(run_spec(entrypoint="a:task")))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert pod._check(spec, time.monotonic() + 60, lambda: True)["trouble"] == "Unfinished"
    spec.write_text("{")
    assert pod._check(spec, time.monotonic() + 60, lambda: False)["trouble"] == "Ended"


def test_words_fit_into_a_termination_message_and_the_jobs_own_slice_comes_first() -> None:
    long = {"error": "Traceback\n" + "ü" * 9000, "kind": "UserError"}
    place = {"name": "b" * 63, "trouble": "denied", "said": "s" * 160}
    each = [{"slice": f"v5e {number}", **pod.words_of(long)} for number in range(16)]
    places = {"buckets": [place] * 8, "zone": "us-central1-b"}
    outcome = Outcome(ExitCode.Succeeded, "made 2 steps" * 1000, 2, places=places, compiled=each)
    message = termination_message(outcome)
    assert len(message) <= TERMINATION_MESSAGE_LIMIT
    assert json.loads(message)["compiled"][0]["slice"] == "v5e 0"
