"""The run spec: the schema allows what the operator writes, the parser reads it, and both refuse the rest by path."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import yaml
from hypothesis import given
from jsonschema import Draft202012Validator
from syrupy.assertion import SnapshotAssertion

from tests.contract.jobs import KINDS_OF_JOBS, any_recipe, stored_job
from tpu_contract import run_spec as trainer
from tpu_contract.run_spec import RunSpecError
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.job.rungs import lower_rungs_of
from tpu_training_operator.domain.objects.shared import config_map

SCHEMA = json.loads(files("tpu_contract").joinpath("runspec-v1.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
ATTEMPT = 7

kinds_of_jobs = pytest.mark.parametrize("changes", KINDS_OF_JOBS.values(), ids=KINDS_OF_JOBS.keys())


def written(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The run spec from the attempt's ConfigMap."""
    job = stored_job(changes)
    return json.loads(config_map(job, resolve(job.spec), ATTEMPT)["data"]["run.json"])


def assert_understood(changes: Mapping[str, Any]) -> None:
    document = written(changes)
    VALIDATOR.validate(document)
    read = trainer.parse_run_spec(document, own_loop="entrypoint" not in document)
    assert trainer.run_spec_document(read) == document


def test_the_schema_itself_is_valid() -> None:
    VALIDATOR.check_schema(SCHEMA)


@kinds_of_jobs
def test_every_kind_of_job_is_understood(changes: Mapping[str, Any]) -> None:
    assert_understood(changes)


OF_A_COMMAND = [kind for name, kind in KINDS_OF_JOBS.items() if "report" not in name and "trainer.loop" not in kind]


@pytest.mark.parametrize("changes", OF_A_COMMAND)
def test_a_loop_of_the_users_own_gets_all_numbers_of_the_recipe(changes: Mapping[str, Any]) -> None:
    own_loop = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}
    understood = without_warnings(trainer.parse_run_spec(written(changes | own_loop), own_loop=True))
    ours = without_warnings(trainer.parse_run_spec(written(changes)))
    assert understood == replace(ours, entrypoint=trainer.NO_ENTRYPOINT)


def without_warnings(spec: trainer.RunSpec) -> trainer.RunSpec:
    """The same run without the plan's warnings, some of which are only about what the trainer does."""
    return replace(spec, scaling=tuple(row for row in spec.scaling if row.name != trainer.WARNING_ROW))


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
    "report": {"uri": "gs://bucket/digits", "profile": {"steps": 5}},
    "runPolicy.sliceCheck": "Check",
}

# What excludes a field of the richest one: schedule Step, and resumeFrom.
PLATEAU = {"name": "Plateau", "metric": "accuracy", "mode": "Max", "patience": 2, "factor": "0.5"}
OTHERWISE = RICHEST | {
    "recipe.schedule": PLATEAU,
    "checkpoint": {"uri": "gs://bucket/digits", "initFrom": {"uri": "gs://bucket/w.safetensors", "strict": False}},
}
OF_PLATEAU = ("schedule.metric", "schedule.mode", "schedule.patience")


SCALED = {
    "tuned on a smaller slice": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "recipe.warmupSteps": 20,
        "recipe.seed": 7,
    },
    "tuned on a larger slice": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-64"},
        "recipe.scaling": {"batch": "GlobalConstant"},
        "recipe.schedule": {"name": "Step", "milestones": [100, 200], "factor": "0.2"},
        "recipe.evaluateEverySteps": 50,
        "recipe.emaDecay": "0.999",
    },
    "everything": RICHEST,
}


@pytest.mark.parametrize("changes", SCALED.values(), ids=SCALED)
def test_each_field_of_the_job_becomes_the_field_of_its_meaning(
    changes: Mapping[str, Any], snapshot: SnapshotAssertion
) -> None:
    assert yaml.safe_dump(written(changes), sort_keys=False, width=200) == snapshot


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
        VALIDATOR.validate(document)
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


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's fullest run spec that has the fields, with these values by path; the value ... removes one."""
    otherwise = any(path in OF_PLATEAU or "initFrom" in path for path in changes)
    document = written(OTHERWISE if otherwise else RICHEST)
    document["endAfterSteps"] = 50
    document["checkpoint"]["rungs"] = f"{document['checkpoint']['uri']}.rungs/5f0c-"
    for path, value in changes.items():
        *parents, last = re.findall(r"[^.[\]]+", path)
        place: Any = document
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    return document


def complaint(document: object) -> str:
    with pytest.raises(RunSpecError) as refusal:
        trainer.parse_run_spec(document)
    return str(refusal.value)


@pytest.mark.parametrize("path", [path for path, required in fields(SCHEMA) if required])
def test_a_missing_field_is_refused_by_name(path: str) -> None:
    assert complaint(changed({path: ...})).startswith(f"{path}: ")


@pytest.mark.parametrize("path", [path for path, required in fields(SCHEMA) if not required])
def test_an_optional_field_may_be_absent(path: str) -> None:
    if path in OF_PLATEAU:
        assert complaint(changed({path: ...})).startswith('schedule: "Plateau" alone')
    else:
        trainer.parse_run_spec(changed({path: ...}))


@pytest.mark.parametrize("path", [path for path, _ in fields(SCHEMA)])
@pytest.mark.parametrize("value", [None, True, 0.5, [None]], ids=["null", "boolean", "fraction", "list"])
def test_a_value_of_the_wrong_type_is_refused_by_name(path: str, value: object) -> None:
    flags = ("report.tensorBoard", "report.gradientNoiseScale", "checkpoint.initFrom.strict", "sliceCheck")
    if value is True and path in flags:
        value = "true"
    assert complaint(changed({path: value})).startswith(f"{path}: ")
    assert not VALIDATOR.is_valid(changed({path: value}))


@pytest.mark.parametrize(
    "path", ["news", *sorted({re.sub(r"[^.]+$", "news", path) for path, _ in fields(SCHEMA) if "." in path})]
)
def test_a_field_of_a_later_version_is_refused_by_name(path: str) -> None:
    assert complaint(changed({path: "1"})).startswith(f"{path}: unknown field; known here: ")


ROW = {"name": "chips", "tunedOn": "4", "runsOn": "16", "rule": ""}
CPU = {"device": "cpu", "collectives": "gloo", "processesPerHost": 2}
TORCH_TPU = {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": 1}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.learningRate", "1e-4"),
        ("optimizer.learningRate", ".5"),
        ("seed", 2**32 - 1),
        ("job.attempt", 0),
        ("torch", {"device": "cuda", "collectives": "nccl", "processesPerHost": 2}),
        ("torch", CPU),
        ("checkpoint", {"uri": "/mnt/run", "keep": 1}),
        ("report", {}),
        ("report", {"uri": "/mnt/run", "tensorBoard": True, "gradientNoiseScale": False}),
        ("loop", "BuiltIn"),
        ("scaling", [ROW] * 64),
        ("scaling", [dict.fromkeys(ROW, "")]),
        ("scaling", [ROW | {"rule": "x" * 4096}]),
    ],
)
def test_the_outermost_values_are_allowed(path: str, value: Any) -> None:
    trainer.parse_run_spec(changed({path: value}))
    VALIDATOR.validate(changed({path: value}))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("job.uid", "", "job.uid: expected a non-empty string, got ''"),
        ("entrypoint", "examples.digits", "entrypoint: expected \"module:callable\", got 'examples.digits'"),
        ("entrypoint", "a:b:c", "entrypoint: expected \"module:callable\", got 'a:b:c'"),
        ("backend", "jax", 'backend: expected "xla" or "xla-spmd" or "torch", got \'jax\''),
        ("hardware", "GPU", 'hardware: expected "TPU" or "CPU", got \'GPU\''),
        ("slice", [], "slice: expected an object, got []"),
        ("slice.hosts", 0, "slice.hosts: expected an integer of at least 1, got 0"),
        ("batch.size", 1, "batch.size: unknown field; known here: global, perReplica, accumulation"),
        ("seed", -1, "seed: expected an integer of at least 0 and at most 4294967295, got -1"),
        ("seed", 2**32, "seed: expected an integer of at least 0 and at most 4294967295, got 4294967296"),
        ("optimizer.learningRate", "-1", 'optimizer.learningRate: expected a decimal string such as "0.1" or "1e-4"'),
        ("optimizer.beta1", "nan", 'optimizer.beta1: expected a decimal string such as "0.1" or "1e-4", got \'nan\''),
        ("parameters.hidden", 128, "parameters.hidden: expected a string, got 128"),
        ("torch", TORCH_TPU | {"execution": "eager"}, 'torch.execution: expected "Compile" or "Fuse" or "Eager"'),
        ("checkpoint", {"uri": "/mnt/run", "keep": 0}, "checkpoint.keep: expected an integer of at least 1, got 0"),
        ("report", {"tensorBoard": 1}, "report.tensorBoard: expected true or false, got 1"),
        ("schedule", {"name": "Step", "milestones": [100, 0]}, "schedule.milestones: expected a list of integers"),
        ("schedule", {"name": "Step", "milestones": [100, True]}, "schedule.milestones: expected a list of integers"),
        ("scaling", [ROW] * 65, "scaling: expected a list of at most 64 objects, got [{'name'"),
        ("scaling", [ROW, "chips"], "scaling: expected a list of at most 64 objects, got [{'name'"),
        ("scaling", [ROW, {"name": "chips"}], "scaling[1].tunedOn: missing"),
        ("scaling", [ROW | {"rule": "x" * 4097}], "scaling[0].rule: expected a string of at most 4096 characters"),
    ],
)
def test_what_would_be_right_is_said(path: str, value: Any, words: str) -> None:
    assert complaint(changed({path: value})).startswith(words)
    assert not VALIDATOR.is_valid(changed({path: value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch.global": 32}, "batch.global: 16 replicas x 8 per replica make 128, got 32"),
        ({"slice.hosts": 3}, "slice.replicas: 16 replicas cannot be divided evenly among 3 hosts"),
        ({"slice.slices": 3}, "slice.hosts: 4 hosts cannot be divided evenly among 3 slices"),
        ({"hardware": "TPU"}, 'backend: "torch" with torch.device "cpu" does not run on hardware "TPU"; torch'),
        ({"torch": TORCH_TPU}, 'backend: "torch" with torch.device "tpu" does not run on hardware "CPU"; torch'),
        ({"torch": CPU | {"processesPerHost": 3}}, "torch.processesPerHost: 16 replicas cannot be divided evenly"),
        (
            {"torch": CPU | {"execution": "Fuse"}},
            'torch.execution: "Fuse" is a mode of TorchTPU and needs torch.device "tpu", got "cpu"',
        ),
        ({"backend": "xla-spmd", "torch": ...}, 'backend: "xla-spmd" on hardware "CPU" runs on one host, because'),
        ({"backend": "xla"}, 'torch: goes with backend "torch" only, got backend "xla"'),
        ({"backend": "xla-spmd"}, 'torch: goes with backend "torch" only, got backend "xla-spmd"'),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    assert complaint(changed(changes)).startswith(words)


def test_another_schema_version_is_the_first_complaint() -> None:
    assert complaint({"schema": "runspec/v2"}) == "schema: this trainer reads \"runspec/v1\", got 'runspec/v2'"
