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


NOISE = ("--set", "recipe.gradientNoiseScale=4000")


@pytest.fixture
def prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.yaml"
    path.write_text("{currency: EUR, perChipHour: {v5e: 1.20, v5litepod-64: 1.00}}")
    return str(path)


def test_with_a_noise_scale_hours_and_money_are_those_to_the_same_loss(
    prices: str, snapshot: SnapshotAssertion
) -> None:
    options = ("--step-seconds", "0.2", *NOISE, "--prices", prices)
    found = compared(*options)
    # The examples times (1 + B / 4000) / (1 + 2048 / 4000): 0.746 at 512, 2.016 at 8192.
    assert [round(column["sameLoss"]["hours"], 2) for column in found] == [9.33, 3.12, 1.57]
    assert [round(column["sameLoss"]["chipHours"], 1) for column in found] == [37.3, 50.0, 100.6]
    assert [column["sameLoss"]["money"] for column in found] == ["44.80 EUR", "60.00 EUR", "100.63 EUR"]
    assert [round(column["lostChipHours"], 2) for column in found] == [0, 0.25, 0.63]
    assert [column["worth"] for column in found] == [["cheapest", "largest that pays"], [], ["fastest"]]
    assert planned("--compare", ",".join(SLICES), *options).stdout == snapshot


@pytest.mark.parametrize("scaling", ["batch=GlobalConstant", "steps=SameLoss"])
def test_a_recipe_that_trains_to_the_same_loss_costs_as_much(scaling: str) -> None:
    options = ("--step-seconds", "0.2", *NOISE, "--set", f"recipe.scaling.{scaling}", "--set", "recipe.epochs=null")
    for column in compared(*options, "--set", "recipe.datasetSize=null", "--set", "recipe.trainSteps=50000"):
        assert column["sameLoss"]["hours"] == pytest.approx(column["cost"]["hours"], rel=1e-3)


def test_adascale_is_planned_at_its_most_and_to_the_same_loss_as_any_other_rule() -> None:
    given = ("--step-seconds", "0.2", *NOISE, "--set", "recipe.tunedOn={acceleratorType: v5litepod-4}")
    linear, adaptive = (compared(*given, *more) for more in ((), ("--set", "recipe.scaling.learningRate=AdaScale")))
    for fixed, column in zip(linear[1:], adaptive[1:], strict=True):
        assert column["cost"]["hours"] > fixed["cost"]["hours"]
        assert column["sameLoss"]["hours"] == fixed["sameLoss"]["hours"]


def test_a_slice_without_a_price_is_named(prices: str, snapshot: SnapshotAssertion) -> None:
    result = planned("--prices", prices, "--slice", "v6e-16", "--step-seconds", "0.2", job=job_body())
    assert result.exit_code == 1
    assert result.stderr == snapshot


def test_the_plan_of_one_slice_has_its_cost(prices: str) -> None:
    options = ("--prices", prices, "--step-seconds", "0.2")
    assert document(*options)["cost"]["money"] == "60.00 EUR"
    assert "60.00 EUR" in planned(*options).stdout
    assert "money" not in document("--prices", prices)["cost"]


def job_file(path: Path, hardware: str = "TPU", speed: str | None = "4096") -> str:
    """Returns what kubectl prints of a job on v5litepod-4."""
    body = job_body({"spec.slice": {"acceleratorType": "v5litepod-4", "hardware": hardware}})
    numbers = {"chips": 4, "replicas": 4, "globalBatchSize": 512, "learningRate": 0.1, "steps": 20}
    rungs = [{"slice": "v5litepod-4", "verdict": "Passed", "examplesPerSecond": speed, **numbers}]
    body["status"] = {"ladder": {"rung": 2, "of": 2, "rungs": rungs}}
    path.write_text(json.dumps(body))
    return str(path)


def test_the_time_of_a_step_is_taken_from_a_job_and_its_rungs(tmp_path: Path) -> None:
    found = compared("--from-job", job_file(tmp_path / "job.json"))
    assert [column["cost"]["stepSeconds"] for column in found] == [0.125] * 3
    assert found[0]["cost"]["stepSecondsFrom"] == "rung 1 of digits ran on v5litepod-4: 0.125 s for 128 per replica"


def test_a_job_that_tells_no_time_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path = tmp_path / "job.json"
    said = []
    for text in ("{}", "[", "[]"):
        path.write_text(text)
        said.append(planned("--from-job", str(path)))
    said += [planned("--from-job", job_file(path, *given)) for given in (("CPU",), ("TPU", None))]
    said.append(planned("--from-job", str(tmp_path / "missing.json")))
    assert [result.exit_code for result in said] == [2] * 6
    assert [result.stderr.splitlines()[-1].replace(str(tmp_path), "") for result in said] == snapshot


def test_the_page_has_a_dot_for_each_slice_whose_hours_are_known() -> None:
    result = planned("--compare", "v5litepod-4,v5litepod-64,v6e-16", "--step-seconds", "0.2", "-o", "html")
    html = result.stdout
    assert "v5e: 12.5 at chip-hours 50, 0.78 at" in html
    assert '">v5litepod-64: fastest, cheapest, largest that pays</span>' in html
    assert html.count('class="label') == 2
    assert "SECONDS@v6e-16" in html
    assert "<svg" not in planned("--compare", "v5litepod-4,v6e-16", "-o", "html").stdout
    assert planned("-o", "html").exit_code == 2


def test_names_in_the_page_are_text() -> None:
    job = job_body({"metadata.name": "a-b", "spec.recipe.optimizer.name": "x"})
    warned = planned("--compare", "v5litepod-4,v5litepod-64", "-o", "html", job=job).stdout
    assert "&#39;x&#39;" in warned


def test_slices_that_do_not_exist_are_told_with_their_option(snapshot: SnapshotAssertion) -> None:
    wrong = planned("--compare", "v5litepod-5, v6e-16,v7", job=job_body())
    assert wrong.exit_code == planned("--step-seconds", "1@v7", job=job_body()).exit_code == 1
    assert wrong.stderr == snapshot
