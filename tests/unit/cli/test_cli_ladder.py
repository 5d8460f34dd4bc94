"""A ladder on the command line: before the job is on it in `tpujob plan`, afterwards in the report page."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from tests.unit.histories import document, typical
from tests.unit.jobs import job_body
from tpu_training_operator.api.status import GateResult, RungStatus, RungVerdict
from tpu_training_operator.cli.main import main
from tpu_training_operator.cli.plan.ladder import rung_lines
from tpu_training_operator.cli.run.job_end import RESULT

RUNGS = [
    {"slice": {"acceleratorType": "v5litepod-4"}, "steps": 20},
    {
        "slice": {"acceleratorType": "v5litepod-8"},
        "steps": 30,
        "gates": {"minEfficiency": "0.9", "evaluation": {"metric": "f1", "min": "0.5"}},
    },
]
TUNED = {"spec.recipe.tunedOn": {"acceleratorType": "v5litepod-4"}, "spec.recipe.globalBatchSize": 32}
LADDER = TUNED | {"spec.ladder.rungs": RUNGS}
PASSED = RungStatus(
    slice="v5litepod-4",
    chips=4,
    replicas=4,
    global_batch_size=32,
    learning_rate="0.1",
    steps=20,
    verdict=RungVerdict.PASSED,
    attempt=1,
    examples_per_second="400",
    first_loss="2",
    last_loss="1",
    gates=[GateResult(name="lossFalls", passed=True, message="it fell")],
)
FAILED = RungStatus(
    slice="v5litepod-8",
    chips=8,
    replicas=8,
    global_batch_size=64,
    learning_rate="0.2",
    steps=30,
    verdict=RungVerdict.FAILED,
    attempt=2,
    examples_per_second="500",
    efficiency="0.625",
    gates=[
        GateResult(name="finite", passed=True, message="all steps were finite"),
        GateResult(name="minEfficiency", passed=False, message="efficiency 0.625, at least 0.9 required"),
    ],
)


def planned(*options: str) -> str:
    result = CliRunner().invoke(main, ["plan", "-f", "-", *options], input=json.dumps(job_body(LADDER)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_plan_has_every_rung_with_its_batch_steps_and_cost() -> None:
    found: list[dict[str, Any]] = json.loads(planned("-o", "json", "--step-seconds", "3600"))["ladder"]
    assert [rung["slice"] for rung in found] == ["v5litepod-4", "v5litepod-8", "v5litepod-16"]
    assert [(rung["globalBatchSize"], rung["learningRate"], rung["steps"]) for rung in found] == [
        (32, "0.1", 20),
        (64, "0.2", 30),
        (128, "0.4", 75),
    ]
    assert [rung["cost"]["chipHours"] for rung in found] == [80, 240, 1200]
    assert found[1]["gates"][-2:] == ["minEfficiency 0.9", "evaluation f1 min 0.5"]


def test_the_table_says_what_the_lower_rungs_cost(snapshot: SnapshotAssertion) -> None:
    text = planned()
    assert "320 chip-steps, 0.267 times" in text
    assert text == snapshot


def test_the_objects_of_the_plan_are_those_of_the_first_rung() -> None:
    objects = json.loads(planned("-o", "json"))["objects"]
    assert [body["metadata"]["name"] for body in objects] == ["digits", "digits-1", "digits-1-env", "digits-1-0-0"]


def test_another_slice_leaves_the_ladder_out() -> None:
    assert "ladder" not in json.loads(planned("-o", "json", "--slice", "v5litepod-4"))


def test_a_failed_rung_shows_what_its_gates_found(snapshot: SnapshotAssertion) -> None:
    assert "\n".join(rung_lines([PASSED, FAILED])) == snapshot


def page(directory: Path, rungs: list[Any]) -> str:
    (directory / "history.json").write_bytes(document(typical()))
    result = {"state": "Failed", "message": "rung 2 of 3 on v5litepod-8: no", "failure": None, "rungs": rungs}
    (directory / RESULT).write_text(json.dumps(result))
    made = CliRunner().invoke(main, ["report", str(directory), "-o", str(directory / "page.html")])
    assert made.exit_code == 0, made.output
    return (directory / "page.html").read_text()


def test_the_report_has_the_ladder_and_how_the_speed_grew(tmp_path: Path) -> None:
    html = page(tmp_path, [PASSED.as_json(), FAILED.as_json()])
    assert "The ladder" in html
    assert "400 at chips 4, 500 at" in html
    assert "efficiency 0.625" in html
    assert "rung 2 of 3 on v5litepod-8" in html


def test_the_report_of_a_job_without_a_ladder_has_none(tmp_path: Path) -> None:
    assert "The ladder" not in page(tmp_path, [])


def test_rungs_that_somebody_has_edited_do_not_keep_the_page_away(tmp_path: Path) -> None:
    broken = [PASSED.as_json() | {"examplesPerSecond": "fast", "chips": 0}, FAILED.as_json() | {"chips": -1}]
    assert "The ladder" in page(tmp_path, broken)


@pytest.mark.parametrize(
    ("trainer", "wanted", "named"),
    [
        ({"backend": "Torch"}, ["HostSync", "InputBound", "Padding"], "HostSync, Padding"),
        ({"backend": "Torch"}, ["RecompilationAfterWarmUp"], "RecompilationAfterWarmUp"),
        ({"backend": "Torch", "torch": {"execution": "Compile"}}, ["RecompilationAfterWarmUp"], None),
        ({"backend": "Torch"}, ["InputBound", "StragglerHost", "NotFinite"], None),
        ({"backend": "XLA"}, ["HostSync"], None),
    ],
)
def test_a_gate_that_no_run_can_pass_gets_a_warning(
    trainer: dict[str, Any], wanted: list[str], named: str | None
) -> None:
    cpu = {"hardware": "CPU"}
    rung = {"slice": {"acceleratorType": "v5litepod-4"} | cpu, "steps": 20, "gates": {"noFindings": wanted}}
    changes = {"spec.ladder.rungs": [rung], "spec.slice.hardware": "CPU"}
    changes |= {f"spec.trainer.{field}": value for field, value in trainer.items()}
    result = CliRunner().invoke(main, ["validate", "-f", "-"], input=json.dumps(job_body(changes)))
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if "gates.noFindings: " in line]
    assert [f"{named}, so this gate fails" in line for line in warnings] == [True] * (named is not None)


@pytest.mark.parametrize(
    ("lower", "top", "cut"),
    [
        (1200, None, {"top.steps": (300, 1200)}),
        (1201, 300, {"rungs[0].steps": (1200, 1201)}),
        (20, 301, {"top.steps": (300, 301)}),
        (20, 300, {}),
    ],
)
def test_a_rung_that_is_longer_than_the_training_gets_a_warning(
    lower: int, top: int | None, cut: dict[str, tuple[int, int]]
) -> None:
    ladder = {"rungs": [{"slice": {"acceleratorType": "v5litepod-4"}, "steps": lower}], "top": {"steps": top}}
    result = CliRunner().invoke(main, ["validate", "-f", "-"], input=json.dumps(job_body({"spec.ladder": ladder})))
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if "the gates judge these" in line]
    expected = [(f"spec.ladder.{field}: ", f"only {has} steps", f"not {asked};") for field, (has, asked) in cut.items()]
    assert len(warnings) == len(expected)
    assert all(part in line for line, parts in zip(warnings, expected, strict=True) for part in parts)
