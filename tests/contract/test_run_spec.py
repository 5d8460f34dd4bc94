"""The run spec: the trainer's schema allows what the operator writes, and its parser reads equal values."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from tests.contract.jobs import KINDS_OF_JOBS, any_recipe, stored_job
from tpu_contract import run_spec as trainer
from tpu_contract.run_spec import RunSpecError
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.job.rungs import lower_rungs_of
from tpu_training_operator.domain.objects.shared import config_map

SCHEMA = json.loads(files("tpu_contract").joinpath("runspec-v1.schema.json").read_text(encoding="utf-8"))
ATTEMPT = 7

kinds_of_jobs = pytest.mark.parametrize("changes", KINDS_OF_JOBS.values(), ids=KINDS_OF_JOBS.keys())


def written(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The run spec from the attempt's ConfigMap."""
    job = stored_job(changes)
    return json.loads(config_map(job, resolve(job.spec), ATTEMPT)["data"]["run.json"])


def assert_understood(changes: Mapping[str, Any]) -> None:
    document = written(changes)
    Draft202012Validator(SCHEMA).validate(document)
    read = trainer.parse_run_spec(document, own_loop="entrypoint" not in document)
    assert trainer.run_spec_document(read) == document


def test_the_schema_itself_is_valid() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@kinds_of_jobs
def test_every_kind_of_job_is_understood(changes: Mapping[str, Any]) -> None:
    assert_understood(changes)


OF_A_COMMAND = [kind for name, kind in KINDS_OF_JOBS.items() if "report" not in name and "trainer.loop" not in kind]


@pytest.mark.parametrize("changes", OF_A_COMMAND)
def test_a_loop_of_the_users_own_gets_all_numbers_of_the_recipe(changes: Mapping[str, Any]) -> None:
    own_loop = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}
    understood = trainer.parse_run_spec(written(changes | own_loop), own_loop=True)
    ours = trainer.parse_run_spec(written(changes))
    assert understood == replace(ours, entrypoint=trainer.NO_ENTRYPOINT)


@given(changes=any_recipe())
def test_any_recipe_is_understood(changes: Mapping[str, Any]) -> None:
    assert_understood(changes)


RICHEST = {
    "recipe.optimizer": KINDS_OF_JOBS["every optimizer field"]["recipe.optimizer"],
    "recipe.schedule": {"name": "Step", "milestones": [100], "factor": "0.1"},
    "recipe.evaluateEverySteps": 100,
    "recipe.stopEarly": {"metric": "accuracy", "mode": "Max", "patience": 3, "minDelta": "0.01"},
    "recipe.trainSteps": ...,
    "recipe.epochs": 30,
    "recipe.datasetSize": 1280,
    "recipe.emaDecay": "0.999",
    "recipe.onNotFinite": "Skip",
    "recipe.gradientClipNorm": "1.0",
    "recipe.precision": "BFloat16Mixed",
    "recipe.sharding": "Optimizer",
    "recipe.parameters": {"hidden": "128"},
    "data": {"uri": "gs://bucket/digits"},
    "slice.hardware": "CPU",
    "trainer.backend": "Torch",
    "trainer.torch": {"execution": "Compile"},
    "trainer.loop": "Lightning",
    "trainer.code": {"uri": "secret://digits-code", "sha256": "0a" * 32},
    "checkpoint": {
        "uri": "gs://bucket/digits",
        "everySteps": 500,
        "everySeconds": 600,
        "keepBest": {"metric": "accuracy", "mode": "Max"},
        "resumeFrom": "gs://bucket/digits/default/first",
    },
    "report": {"uri": "gs://bucket/digits"},
}

# What excludes a field of the richest one: schedule Step, and resumeFrom.
PLATEAU = {"name": "Plateau", "metric": "accuracy", "mode": "Max", "patience": 2, "factor": "0.5"}
OTHERWISE = RICHEST | {
    "recipe.schedule": PLATEAU,
    "checkpoint": {"uri": "gs://bucket/digits", "initFrom": {"uri": "gs://bucket/w.safetensors", "strict": False}},
}
OF_PLATEAU = ("schedule.metric", "schedule.mode", "schedule.patience")


def test_each_field_of_the_job_becomes_the_field_of_its_meaning() -> None:
    document = written(RICHEST) | {"job": None, "slice": None, "batch": None, "scaling": None, "recipe": None}
    settings = dict(RICHEST["recipe.optimizer"])
    numbers = {setting: str(float(value)) for setting, value in settings.items() if setting != "name"}
    assert document == {
        "schema": "runspec/v1",
        **dict.fromkeys(("job", "slice", "batch", "scaling", "recipe")),
        "entrypoint": "examples.digits:task",
        "loop": "Lightning",
        "backend": "torch",
        "hardware": "CPU",
        "trainSteps": 300,
        "warmupSteps": 0,
        "schedule": {"name": "Step", "milestones": [100], "factor": "0.1"},
        "evaluateEverySteps": 100,
        "stopEarly": {"metric": "accuracy", "mode": "Max", "patience": 3, "minDelta": "0.01"},
        "emaDecay": "0.999",
        "onNotFinite": "Skip",
        "gradientClipNorm": "1.0",
        "precision": "BFloat16Mixed",
        "sharding": "Optimizer",
        "datasetSize": 1280,
        "seed": 0,
        "optimizer": settings | numbers,
        "parameters": {"hidden": "128"},
        "dataUri": "gs://bucket/digits",
        "torch": {"device": "cpu", "collectives": "gloo", "processesPerHost": 1, "execution": "Compile"},
        "code": RICHEST["trainer.code"],
        "checkpoint": RICHEST["checkpoint"] | {"uri": "gs://bucket/digits/default/digits", "keep": 3},
        "report": {"uri": "gs://bucket/digits"},
    }


LOWER_RUNGS = [
    {"slice": {"acceleratorType": "v5litepod-4"}, "steps": 20},
    {"slice": {"acceleratorType": "v5litepod-8"}, "steps": 10_000},
]
SAVED = {"uri": "gs://bucket/digits", "everySteps": 5}


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({}, [None, None]),
        ({"checkpoint": SAVED}, [None, None]),
        ({"checkpoint": SAVED, "ladder.from": "Checkpoint"}, [None, "gs://bucket/digits/default/digits.rungs/UID-7"]),
        (
            {"checkpoint": SAVED | {"initFrom": {"uri": "gs://bucket/w.safetensors"}}},
            ["gs://bucket/digits/default/digits.rungs/UID-7"] * 2,
        ),
    ],
)
def test_a_rung_makes_the_first_steps_of_its_training_and_keeps_checkpoints_elsewhere(
    changes: Mapping[str, Any], places: list[str | None]
) -> None:
    job = stored_job({"ladder.rungs": LOWER_RUNGS, **changes})
    for lower_rung, steps, place in zip(lower_rungs_of(job), (20, 600), places, strict=True):
        document = json.loads(config_map(lower_rung.job, lower_rung.resolution, ATTEMPT)["data"]["run.json"])
        Draft202012Validator(SCHEMA).validate(document)
        read = trainer.parse_run_spec(document)
        assert (read.last_step, read.end_after_steps) == (steps, steps)
        assert read.batch.total == lower_rung.resolution.recipe.batch.total
        assert (read.checkpoint and read.checkpoint.uri) == (place and place.replace("UID", job.uid))
        if place is not None:
            last = json.loads(config_map(job, resolve(job.spec), ATTEMPT)["data"]["run.json"])
            assert place.replace("UID", job.uid).startswith(trainer.parse_run_spec(last).checkpoint.rungs)
        assert read.checkpoint is None or (read.checkpoint.every_steps, read.checkpoint.every_seconds) == (None, None)


def fields(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """The path of every field in the schema (in a list of objects, of its first), and whether it is required."""
    for name, below in schema.get("properties", {}).items():
        yield path + name, name in schema.get("required", ())
        yield from fields(below, f"{path}{name}.")
        yield from fields(below.get("items", {}), f"{path}{name}[0].")


def changed(path: str, value: Any) -> dict[str, Any]:
    """The operator's fullest run spec that has the field, with the field set, or removed by the value ..."""
    document = copy.deepcopy(written(OTHERWISE if path in OF_PLATEAU or "initFrom" in path else RICHEST))
    document["endAfterSteps"] = 50
    document["checkpoint"]["rungs"] = f"{document['checkpoint']['uri']}.rungs/5f0c-"
    *parents, last = re.findall(r"[^.[\]]+", path)
    place: Any = document
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    if value is ...:
        place.pop(last, None)
    else:
        place[last] = value
    return document


def complaint(document: dict[str, Any]) -> str:
    with pytest.raises(RunSpecError) as refusal:
        trainer.parse_run_spec(document)
    return str(refusal.value)


@pytest.mark.parametrize("path", [path for path, required in fields(SCHEMA) if required])
def test_a_missing_field_is_refused_by_name(path: str) -> None:
    assert complaint(changed(path, ...)).startswith(f"{path}: ")


@pytest.mark.parametrize("path", [path for path, required in fields(SCHEMA) if not required])
def test_an_optional_field_may_be_absent(path: str) -> None:
    if path in OF_PLATEAU:
        assert complaint(changed(path, ...)).startswith('schedule: "Plateau" alone')
    else:
        trainer.parse_run_spec(changed(path, ...))


@pytest.mark.parametrize("path", [path for path, _ in fields(SCHEMA)])
@pytest.mark.parametrize("value", [None, True, 0.5, [None]], ids=["null", "boolean", "fraction", "list"])
def test_a_value_of_the_wrong_type_is_refused_by_name(path: str, value: object) -> None:
    if value is True and path in ("report.tensorBoard", "report.gradientNoiseScale", "checkpoint.initFrom.strict"):
        value = "true"
    assert complaint(changed(path, value)).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "path", ["news", *sorted({re.sub(r"[^.]+$", "news", path) for path, _ in fields(SCHEMA) if "." in path})]
)
def test_a_field_of_a_later_version_is_refused_by_name(path: str) -> None:
    assert complaint(changed(path, "1")).startswith(f"{path}: unknown field")
