"""The parts of `compile-check` that need no compiler: the search, and reading a scheduled program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.cluster.deadlines import deadline
from tests.trainer.gang_processes import run_spec
from tpu_contract.protocol import TERMINATION_MESSAGE_LIMIT, ExitCode
from tpu_trainer.checks.compile import check, command
from tpu_trainer.checks.compile.hlo import Array, Collective, read
from tpu_trainer.checks.compile.search import MANY, MOST, PRECISION, ROWS, Largest, Need, largest
from tpu_trainer.contract.outcome import Outcome, termination_message

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

    def measure(spec: Any, examples: int | None, cache: Any) -> dict[str, Any]:
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

    def measure(spec: Any, examples: int | None, cache: Any) -> dict[str, Any]:
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
    assert scheduled.collectives == [Collective("all-reduce", 16 * 300 * 4, 0.5, True, 2 * 16 * 384 * 4)]
    assert scheduled.order == ["matmul", "sum", "matmul"]
    x, w, y = 16 * 128 * 4, 16 * 384 * 2, 16 * 384 * 4
    # The copy reads x and writes to the core; each product reads w and writes; the sum does both.
    assert scheduled.traffic == x + 2 * (w + y) + 2 * y


LOOKUPS = """HloModule jit, is_scheduled=true

%fused (p: f32[1000,64], i: s32[8]) -> f32[8,64] {
  %p = f32[1000,64]{1,0:T(8,128)} parameter(0)
  %i = s32[8]{0:T(128)} parameter(1)
  ROOT %g = f32[8,64]{1,0:T(8,128)} gather(%p, %i), offset_dims={1}
}

%fused.1 (q: f32[1000,64], j: s32[8], u: f32[8,64]) -> f32[1000,64] {
  %q = f32[1000,64]{1,0:T(8,128)} parameter(0)
  %j = s32[8]{0:T(128)} parameter(1)
  %u = f32[8,64]{1,0:T(8,128)} parameter(2)
  ROOT %s = f32[1000,64]{1,0:T(8,128)} scatter(%q, %j, %u), to_apply=%add
}

ENTRY %main (t: f32[1000,64], n: s32[8]) -> f32[1000,64] {
  %t = f32[1000,64]{1,0:T(8,128)} parameter(0)
  %n = s32[8]{0:T(128)S(1)} parameter(1)
  %rows = f32[8,64]{1,0:T(8,128)} fusion(%t, %n), kind=kCustom, calls=%fused
  %all-gather-start = (f32[8,64]{1,0:T(8,128)S(1)}, f32[32,64]{1,0:T(8,128)S(1)}) all-gather-start(%rows)
  %all-gather-done = f32[32,64]{1,0:T(8,128)S(1)} all-gather-done(%all-gather-start)
  ROOT %table = f32[1000,64]{1,0:T(8,128)} fusion(%t, %n, %rows), kind=kCustom, calls=%fused.1
}
"""


def test_a_lookup_reads_and_writes_its_rows_and_not_the_table() -> None:
    rows = 8 * 128 * 4
    (gathered,) = read(LOOKUPS).collectives
    # They are read and written, read to be sent, and read, added to those of the table and written back.
    assert read(LOOKUPS).traffic == 2 * rows + rows + 3 * rows
    assert (gathered.kind, gathered.waits) == ("all-gather", False)


LOOP = """HloModule jit, is_scheduled=true

%body (b: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %b = (s32[]{:T(128)S(1)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %c = s32[]{:T(128)S(1)} get-tuple-element(%b), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%b), index=1
  %y = f32[8,128]{1,0:T(8,128)} convolution(%x, %x), dim_labels=bf_io->bf
  ROOT %r = (s32[]{:T(128)S(1)}, f32[8,128]{1,0:T(8,128)}) tuple(%c, %y)
}

%condition (d: (s32[], f32[8,128])) -> pred[] {
  %d = (s32[]{:T(128)S(1)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %e = s32[]{:T(128)S(1)} get-tuple-element(%d), index=0
  %n = s32[]{:T(128)S(1)} constant(6)
  ROOT %l = pred[]{:T(512)S(6)} compare(%e, %n), direction=LT
}

ENTRY %main (z: s32[], a: f32[8,128]) -> (s32[], f32[8,128]) {
  %z = s32[]{:T(128)S(1)} parameter(0)
  %a = f32[8,128]{1,0:T(8,128)} parameter(1)
  %t = (s32[]{:T(128)S(1)}, f32[8,128]{1,0:T(8,128)}) tuple(%z, %a)
  ROOT %w = (s32[]{:T(128)S(1)}, f32[8,128]{1,0:T(8,128)}) while(%t), condition=%condition, body=%body
}
"""


def test_the_body_of_a_loop_counts_once_for_each_trip() -> None:
    scheduled = read(LOOP)
    # The product reads its argument twice and writes.
    assert scheduled.traffic == 6 * 3 * 8 * 128 * 4
    assert scheduled.order == ["matmul"] * 6


def test_what_is_missing_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.util, "find_spec", lambda name: None if name == "jax" else object())
    said = check.missing()
    assert said.startswith("the check needs jax, which ")
    assert "tpu-training-operator[aot]" in said


@pytest.mark.parametrize("text", ["not JSON", "[]", "{}", '{"slice": 3}'])
def test_a_broken_run_spec_is_no_traceback(text: str, tmp_path: Path) -> None:
    spec, answer = tmp_path / "spec.json", tmp_path / "answer.json"
    spec.write_text(text)
    assert command.main(["--run-spec", str(spec), "--output", str(answer)]) == command.CANNOT_SAY
    assert json.loads(answer.read_bytes())["trouble"] in ("BadSpec", "Missing")


# However compiling ends.

ANSWER = {
    "fits": False,
    "batch": {"perReplica": 64, "accumulation": 1},
    "replicas": 4,
    "memory": {"needed": 20, "limit": 16},
    "found": [],
    "refusal": "RESOURCE_EXHAUSTED: no room",
}
SHORT = {"compiled": {name: value for name, value in ANSWER.items() if name != "found"}}
# What is called to trace a step.
TRACERS = {
    "crashes": "kill -SEGV $$",
    "is killed": "kill -KILL $$",
    "leaves nothing": "exit 0",
    "fails": "echo why >&2; exit 3",
    "does not know the slice": """echo '{"error": "no", "code": "UserError"}'""",
    "hangs": "exec sleep 1000",
}


def checked_in_a_pod(
    tmp_path: Path, tracer: str, seconds: float = 60, before: str = "", signals: bool = False
) -> dict[str, Any]:
    """The termination message of an entry check's pod; `before` is run in the process that compiles."""
    script, words = tmp_path / "python", tmp_path / "words"
    script.write_text(f"#!/bin/sh\n{tracer}\n")
    script.chmod(0o755)
    (tmp_path / "run.json").write_text(json.dumps(run_spec(entrypoint="a:task")))
    program = f"""
import sys, time
from tpu_trainer.checks.compile import check, command
check.missing = lambda: None
sys.executable = {str(script)!r}
{before}
sys.exit(command.main(["--run-spec", {str(tmp_path / "run.json")!r}, "--entry-check", '{{"message": "made 2 steps"}}']))
"""
    env = {**os.environ, "TPUJOB_COMPILE_SECONDS": str(seconds), "TPUJOB_TERMINATION_LOG": str(words)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if signals:
            assert process.stdout.readline() == "compiles\n"
            process.terminate()
        assert process.wait(deadline(60)) == 0, process.stdout.read()
    document: dict[str, Any] = json.loads(words.read_text())
    assert (document.pop("outcome"), document.pop("message")) == ("Succeeded", "made 2 steps")
    return document


@pytest.mark.parametrize(
    ("tracer", "seconds", "trouble", "said"),
    [
        ("crashes", 60, "Ended", "tracing ended with Segmentation fault:"),
        ("is killed", 60, "Ended", "tracing ended with Killed, as when memory is short:"),
        ("leaves nothing", 60, "Ended", "something in the task ended the process that traces it (os._exit)"),
        ("fails", 60, "Ended", "tracing ended with code 3:"),
        ("does not know the slice", 60, "UserError", "no"),
        ("hangs", 2, "TooSlow", None),
    ],
)
def test_however_tracing_ends_the_pod_has_words_for_it(
    tracer: str, seconds: float, trouble: str, said: str | None, tmp_path: Path
) -> None:
    answer = checked_in_a_pod(tmp_path, TRACERS[tracer], seconds)["compiled"]
    assert (answer["trouble"], answer.get("said")) == (trouble, said)


def test_a_search_that_is_not_done_in_time_leaves_the_answer_about_the_jobs_own_batch(tmp_path: Path) -> None:
    before = f"check._measure = lambda spec, examples, cache: time.sleep(1000) if examples else {ANSWER!r}"
    assert checked_in_a_pod(tmp_path, "", 2, before) == SHORT


def test_a_pod_that_is_stopped_while_it_compiles_ends_and_says_that_it_has_not_finished(tmp_path: Path) -> None:
    before = "check._measure = lambda *_: (print('compiles', flush=True), time.sleep(1000))"
    assert checked_in_a_pod(tmp_path, "", before=before, signals=True)["compiled"]["trouble"] == "Unfinished"


def test_an_answer_fits_into_a_termination_message() -> None:
    long = "\u00fc" * 9000
    place = {"name": "b" * 63, "trouble": "denied", "said": "s" * 160}
    places = {"buckets": [place] * 8, "zone": "us-central1-b"}
    finding = {"kind": "DynamicShape", "operation": long, "where": long, "shapes": long}
    answer = {**ANSWER, "refusal": long, "found": [finding] * 20, "padding": {"tensors": [long] * 10}}
    outcome = Outcome(ExitCode.Succeeded, "made 2 steps" * 1000, 2, places=places, compiled=command.shorten(answer))
    message = termination_message(outcome)
    assert len(message) <= TERMINATION_MESSAGE_LIMIT
    assert json.loads(message)["compiled"]["memory"] == ANSWER["memory"]


def test_a_traceback_is_shortened_to_its_last_line() -> None:
    said = "Traceback (most recent call last):\n  File\nNameError: lern"
    assert command.shorten({"trouble": "UserError", "said": said})["said"] == "NameError: lern"
