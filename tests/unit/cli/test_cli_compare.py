"""`tpujob plan --compare`: one recipe on several slices, and which of them is worth its chips."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import job_body
from tpu_training_operator.cli.main import main

RESNET50 = str(Path(__file__).parents[3] / "examples" / "resnet50.yaml")
SLICES = ["v5litepod-4", "v5litepod-16", "v5litepod-64"]


def planned(*options: str, job: dict[str, Any] | None = None) -> Result:
    file, text = ("-", yaml.safe_dump(job)) if job else (RESNET50, None)
    return CliRunner().invoke(main, ["plan", file, *options], input=text)


def document(*options: str, job: dict[str, Any] | None = None) -> Any:
    result = planned("-o", "json", *options, job=job)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def compared(*options: str, job: dict[str, Any] | None = None, slices: list[str] = SLICES) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document("--compare", ",".join(slices), *options, job=job)
    return found


@pytest.mark.parametrize("job", [None, job_body({"spec.recipe.tunedOn": {"acceleratorType": "v5litepod-4"}})])
def test_every_column_is_the_plan_of_its_slice(job: dict[str, Any] | None) -> None:
    for name, column in zip(SLICES, compared(job=job), strict=True):
        alone = document("--slice", name, job=job)
        assert column["resolved"] == alone["resolved"]
        assert column["cost"] == alone["cost"]


# ResNet-50 without tunedOn, 2048 on 16 chips: 90 epochs of floor(1281167 / B) steps.
def test_the_hours_of_a_job_that_does_not_say_where_it_was_tuned(snapshot: SnapshotAssertion) -> None:
    found = compared("--step-seconds", "0.2")
    assert [column["resolved"]["globalBatchSize"] for column in found] == [512, 2048, 8192]
    assert [column["resolved"]["trainSteps"] for column in found] == [225180, 56250, 14040]
    assert [round(column["cost"]["hours"], 2) for column in found] == [12.51, 3.12, 0.78]
    assert [round(column["cost"]["chipHours"], 1) for column in found] == [50.0, 50.0, 49.9]
    assert planned("--compare", ",".join(SLICES), "--step-seconds", "0.2").stdout == snapshot


def test_a_slice_that_accumulates_takes_the_hours_of_its_passes() -> None:
    found = compared("--step-seconds", "0.2", "--set", "recipe.scaling.batch=GlobalConstant")
    assert [column["resolved"]["accumulationSteps"] for column in found] == [4, 1, 1]
    assert [column["cost"]["stepSeconds"] for column in found] == pytest.approx([0.8, 0.2, 0.05])
    assert [round(column["cost"]["hours"], 2) for column in found] == [12.5, 3.12, 0.78]


def test_a_time_may_be_measured_on_another_slice() -> None:
    constant = ("--set", "recipe.scaling.batch=GlobalConstant")
    elsewhere = document("--step-seconds", "0.8@v5litepod-4", *constant)["cost"]
    assert elsewhere["stepSeconds"] == pytest.approx(0.2)
    assert elsewhere["stepSecondsFrom"] == "measured on v5litepod-4: 0.8 s for 512 per replica"


def test_of_a_generation_on_which_nothing_was_measured_no_hours_are_told(snapshot: SnapshotAssertion) -> None:
    options = ("--step-seconds", "0.2", "--compare", "v5litepod-16,v6e-16")
    text = planned(*options).stdout
    assert ["hours" in column["cost"] for column in document(*options)] == [True, False]
    assert "SECONDS@v6e-16" in text
    assert text.splitlines()[-2:] == snapshot
    # Two measurements tell of both.
    both = document(*options, "--step-seconds", "0.1@v6e-4")
    assert [round(column["cost"]["hours"], 2) for column in both] == [3.12, 1.56]


def test_slices_that_do_not_exist_are_told_with_their_option(snapshot: SnapshotAssertion) -> None:
    wrong = planned("--compare", "v5litepod-5, v6e-16,v7", job=job_body())
    assert wrong.exit_code == planned("--step-seconds", "1@v7", job=job_body()).exit_code == 2
    assert wrong.stderr == snapshot
