"""What `--slice`, `--steps` and `--set` make of a job."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.contract.jobs import job_body
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.cli.common.changes import move, rehearse, set_values, shorten
from tpu_training_operator.cli.common.errors import CommandError
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve


def body_with(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return job_body({"slice.hardware": "CPU", **(changes or {})})


def resolved(body: dict[str, Any]) -> Resolution:
    return resolve(parse_job(body).spec)


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("recipe.seed=7", ("recipe", "seed"), 7),
        ("spec.recipe.seed=7", ("recipe", "seed"), 7),
        ("recipe.optimizer.learningRate=1e-3", ("recipe", "optimizer", "learningRate"), 0.001),
        ("recipe.parameters.width=64", ("recipe", "parameters", "width"), "64"),
        ("recipe.parameters.rule=a=b", ("recipe", "parameters", "rule"), "a=b"),
        ("runPolicy.suspend=true", ("runPolicy", "suspend"), True),
        ("trainer.args=[--lr, '0.1']", ("trainer", "args"), ["--lr", "0.1"]),
        ("trainer.entrypoint=null", ("trainer", "entrypoint"), None),
        ("checkpoint.uri=gs://b/c", ("checkpoint", "uri"), "gs://b/c"),
    ],
)
def test_a_field_is_set_in_the_type_that_the_api_wants(assignment: str, path: tuple[str, ...], value: object) -> None:
    body = body_with()
    set_values(body, [assignment])
    found = body["spec"]
    for name in path:
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    "assignment",
    [
        "recipe.seed",
        "=7",
        "trainer.entrypoint.name=x",
        "recipe.seed=[1",
        "recipe.seed=2024-13-45",
    ],
)
def test_what_cannot_be_set_is_told(assignment: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(CommandError) as caught:
        set_values(body_with(), [assignment])
    assert str(caught.value) == snapshot


def test_on_another_slice_every_replica_keeps_its_batch() -> None:
    body = body_with()
    before = resolved(body).recipe.batch
    move(body, "v5litepod-64")
    after = resolved(body)
    assert after.layout.hosts == 16
    assert (after.recipe.batch.per_replica, after.recipe.batch.total) == (before.per_replica, 4 * before.total)


EIGHT = {"slice": {"acceleratorType": "v5litepod-8"}}
FOUR = {"slice": {"acceleratorType": "v5litepod-4"}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"alternatives": [EIGHT]}, None),
        ({"alternatives": [{"slice": {"generation": "v5e", "topology": "2x4"}}, FOUR]}, {"alternatives": [FOUR]}),
        ({"alternatives": [FOUR]}, {"alternatives": [FOUR]}),
        ({"alternatives": [EIGHT], "count": {"min": 1}}, {"alternatives": None, "count": {"min": 1}}),
        # The same shape that is provisioned in another way is another choice.
        (
            {"alternatives": [{"slice": {**EIGHT["slice"], "provisioning": {"type": "Spot"}}}]},
            {"alternatives": [{"slice": {**EIGHT["slice"], "provisioning": {"type": "Spot"}}}]},
        ),
        # What is wrong stays for the check.
        ({"alternatives": ["v5litepod-8"]}, {"alternatives": ["v5litepod-8"]}),
        (
            {"alternatives": [{"slice": {"acceleratorType": "v5"}}]},
            {"alternatives": [{"slice": {"acceleratorType": "v5"}}]},
        ),
    ],
    ids=str,
)
def test_another_slice_is_no_alternative_to_itself(before: dict[str, Any], after: dict[str, Any] | None) -> None:
    body = job_body({"placement": before})
    move(body, "v5litepod-8")
    assert body["spec"].get("placement") == after


def test_another_slice_leaves_the_slice_that_the_recipe_names() -> None:
    body = body_with({"recipe.tunedOn": {"acceleratorType": "v5litepod-4"}})
    move(body, "v5litepod-8")
    assert body["spec"]["recipe"]["tunedOn"] == {"acceleratorType": "v5litepod-4"}
    assert body["spec"]["slice"] == {"acceleratorType": "v5litepod-8", "hardware": "CPU"}


@pytest.mark.parametrize("named", [{}, {"recipe.tunedOn": None}])
def test_a_recipe_that_names_no_slice_was_tuned_on_the_one_that_is_left(named: dict[str, Any]) -> None:
    body = job_body(named)
    move(body, "v5litepod-8")
    assert body["spec"]["recipe"]["tunedOn"] == {"acceleratorType": job_body()["spec"]["slice"]["acceleratorType"]}


@pytest.mark.parametrize(
    "change",
    [
        lambda body: set_values(body, ["slice.acceleratorType=v5litepod-16"]),
        lambda body: move(body, "v5litepod-16"),
        rehearse,
    ],
)
def test_a_change_of_the_slice_stays_out_of_a_recipe_that_names_it_by_a_yaml_anchor(change: Any) -> None:
    body = body_with()
    body["spec"]["slice"] = body["spec"]["recipe"]["tunedOn"] = {"acceleratorType": "v5litepod-4"}
    change(body)
    assert body["spec"]["slice"] != {"acceleratorType": "v5litepod-4"}
    assert body["spec"]["recipe"]["tunedOn"] == {"acceleratorType": "v5litepod-4"}


@settings(max_examples=60)
@given(
    steps=st.integers(1, 500),
    tuned=st.sampled_from(["v5litepod-4", "v5litepod-16"]),
    length=st.sampled_from([{"trainSteps": 1000}, {"trainSteps": ..., "epochs": 3, "datasetSize": 5000}]),
    warmup=st.sampled_from([{}, {"warmupSteps": 100}]),
    schedule=st.sampled_from([{}, {"schedule": {"name": "Step", "milestones": [300, 301, 900]}}]),
)
def test_a_shorter_run_has_the_steps_asked_for_on_an_equal_or_larger_slice(
    steps: int, tuned: str, length: dict[str, Any], warmup: dict[str, Any], schedule: dict[str, Any]
) -> None:
    recipe = {"tunedOn": {"acceleratorType": tuned}, **length, **warmup, **schedule}
    body = body_with({f"recipe.{name}": value for name, value in recipe.items()})
    shorten(body, resolved(body), steps)
    assert resolved(body).recipe.train_steps == steps


def test_a_shorter_run_reaches_everything_at_the_same_share_of_the_training() -> None:
    recipe = {"tunedOn": {"acceleratorType": "v5litepod-4"}, "trainSteps": ..., "epochs": 10, "datasetSize": 5120}
    schedule = {"name": "Step", "milestoneEpochs": [3, 9]}
    epochs = {"schedule": schedule, "warmupEpochs": 2, "evaluateEveryEpochs": 5}
    body = body_with({f"recipe.{name}": value for name, value in (recipe | epochs).items()})
    before = resolved(body).recipe
    shorten(body, resolved(body), before.train_steps // 5)
    after = resolved(body).recipe
    assert after.milestones == tuple(milestone // 5 for milestone in before.milestones)
    assert (after.warmup_steps, after.evaluate_every_steps) == (before.warmup_steps // 5, before.train_steps // 10)


def test_a_shorter_run_has_the_steps_asked_for_whatever_the_same_loss_takes() -> None:
    measured = {"gradientNoiseScale": 100, "scaling": {"steps": "SameLoss"}}
    recipe = {"tunedOn": {"acceleratorType": "v5litepod-4"}, **measured}
    body = body_with({f"recipe.{name}": value for name, value in recipe.items()})
    shorten(body, resolved(body), 30)
    assert resolved(body).recipe.train_steps == 30


def test_on_a_smaller_slice_a_shorter_run_has_at_least_one_step_of_the_recipes() -> None:
    body = body_with({"recipe.tunedOn": {"acceleratorType": "v5litepod-64"}})
    shorten(body, resolved(body), 1)
    assert resolved(body).recipe.train_steps == 4
