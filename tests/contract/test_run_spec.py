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
from tpu_trainer.contract import spec as trainer
from tpu_trainer.contract.errors import BadSpecError
from tpu_training_operator.api.job import Report, TPUTrainingJob
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.trainer import TorchRuntime
from tpu_training_operator.domain.job.recipe.comparison import comparison
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve
from tpu_training_operator.domain.job.rungs import lower_rungs_of
from tpu_training_operator.domain.objects.shared import config_map

SCHEMA = json.loads(files("tpu_contract").joinpath("runspec-v1.schema.json").read_text(encoding="utf-8"))
ATTEMPT = 7

kinds_of_jobs = pytest.mark.parametrize("changes", KINDS_OF_JOBS.values(), ids=KINDS_OF_JOBS.keys())


def written(changes: Mapping[str, Any]) -> tuple[TPUTrainingJob, Resolution, dict[str, Any]]:
    """The job, what the operator derives from it, and the run spec from the attempt's ConfigMap."""
    job = stored_job(changes)
    resolution = resolve(job.spec)
    return job, resolution, json.loads(config_map(job, resolution, ATTEMPT)["data"]["run.json"])


def meant(job: TPUTrainingJob, resolution: Resolution) -> trainer.RunSpec:
    """The values that the trainer must read, in its own types."""
    layout, scaled, recipe = resolution.layout, resolution.recipe, job.spec.recipe

    stop = recipe.stop_early

    def number(text: str | None) -> float | None:
        return None if text is None else float(text)

    return trainer.RunSpec(
        job=trainer.JobRef(job.namespace, job.name, job.uid, ATTEMPT),
        entrypoint=job.spec.trainer.entrypoint,
        backend={"XLA": "xla", "XLASPMD": "xla-spmd", "Torch": "torch"}[job.spec.trainer.backend],
        hardware=job.spec.slice.hardware,
        slice=trainer.SliceSpec(
            layout.shape.generation, layout.shape.topology, layout.slices, layout.hosts, layout.replicas
        ),
        batch=trainer.BatchSpec(scaled.batch.total, scaled.batch.per_replica, scaled.batch.accumulation),
        train_steps=scaled.train_steps,
        warmup_steps=scaled.warmup_steps,
        schedule=trainer.ScheduleSpec(
            recipe.schedule.name,
            scaled.milestones,
            number(recipe.schedule.factor),
            recipe.schedule.metric,
            recipe.schedule.mode and trainer.Mode(recipe.schedule.mode),
            recipe.schedule.patience,
        ),
        evaluate_every_steps=scaled.evaluate_every_steps,
        stop_early=stop
        and trainer.StopSpec(stop.metric, trainer.Mode(stop.mode), stop.patience, number(stop.min_delta)),
        ema_decay=number(scaled.ema_decay),
        dataset_size=recipe.dataset_size,
        seed=recipe.seed,
        optimizer=trainer.OptimizerSpec(
            name=recipe.optimizer.name,
            learning_rate=float(scaled.learning_rate),
            momentum=number(recipe.optimizer.momentum),
            weight_decay=number(scaled.weight_decay),
            beta1=number(scaled.betas.get("beta1")),
            beta2=number(scaled.betas.get("beta2")),
            epsilon=number(recipe.optimizer.epsilon),
        ),
        parameters=recipe.parameters or {},
        data_uri=job.spec.data.uri if job.spec.data else None,
        on_not_finite=trainer.NotFinitePolicy(recipe.on_not_finite),
        gradient_clip_norm=number(recipe.gradient_clip_norm),
        precision=recipe.precision,
        sharding=recipe.sharding,
        loop=job.spec.trainer.loop,
        torch=_torch(job.spec.trainer.torch),
        code=job.spec.trainer.code and trainer.CodeSpec(**job.spec.trainer.code.model_dump()),
        checkpoint=_checkpoint(job),
        report=_report(job.spec.report),
        scaling=tuple(
            trainer.ScalingRow(row.name, row.tuned_on, row.runs_on, row.rule) for row in comparison(recipe, resolution)
        ),
        recipe=dict(_leaves("recipe", _compared(recipe))),
    )


def _compared(recipe: Recipe) -> dict[str, Any]:
    """How often a run evaluates matters only if it decides something by its evaluations."""
    left_out = {"parameters", "gradient_noise_scale", "sharding"}
    if recipe.stop_early is None and recipe.schedule.name != "Plateau":
        left_out.add("evaluate_every_steps")
    return recipe.model_dump(by_alias=True, mode="json", exclude_defaults=True, exclude=left_out)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    match value:
        case dict():
            for name, below in value.items():
                yield from _leaves(f"{path}.{name}", below)
        case str():
            yield path, value
        case _:
            yield path, json.dumps(value)


def _torch(given: TorchRuntime | None) -> trainer.TorchSpec:
    if given is None:
        return trainer.TorchSpec("cpu", "gloo", 1)
    return trainer.TorchSpec(given.device, given.collectives, given.processes_per_host)


def _checkpoint(job: TPUTrainingJob) -> trainer.CheckpointSpec | None:
    given = job.spec.checkpoint
    if given is None:
        return None
    seconds = 600 if given.every_steps is None and given.every_seconds is None else given.every_seconds
    folder = f"{given.uri}/{job.namespace}/{job.name}"
    best = given.keep_best and trainer.BestSpec(given.keep_best.metric, trainer.Mode(given.keep_best.mode))
    begins = given.init_from and trainer.InitSpec(given.init_from.uri, given.init_from.strict)
    return trainer.CheckpointSpec(folder, given.every_steps, seconds, given.keep, best, given.resume_from, begins)


def _report(given: Report | None) -> trainer.ReportSpec:
    if given is None:
        return trainer.ReportSpec(None, tensor_board=False, gradient_noise_scale=False)
    return trainer.ReportSpec(given.uri, given.tensor_board, given.gradient_noise_scale)


def assert_understood(changes: Mapping[str, Any]) -> None:
    job, resolution, document = written(changes)
    Draft202012Validator(SCHEMA).validate(document)
    assert trainer.parse_run_spec(document) == meant(job, resolution)


def test_the_schema_itself_is_valid() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@kinds_of_jobs
def test_every_kind_of_job_is_understood(changes: Mapping[str, Any]) -> None:
    assert_understood(changes)


OF_A_COMMAND = [kind for name, kind in KINDS_OF_JOBS.items() if "report" not in name and "trainer.loop" not in kind]


@pytest.mark.parametrize("changes", OF_A_COMMAND)
def test_a_loop_of_the_users_own_gets_all_numbers_of_the_recipe(changes: Mapping[str, Any]) -> None:
    own_loop = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}
    understood = trainer.parse_run_spec(written(changes | own_loop)[2], own_loop=True)
    ours = trainer.parse_run_spec(written(changes)[2])
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
    document = copy.deepcopy(written(OTHERWISE if path in OF_PLATEAU or "initFrom" in path else RICHEST)[2])
    document["endAfterSteps"] = 50
    document["checkpoint"]["rungs"] = f"{document['checkpoint']['uri']}.rungs/5f0c-"
    *parents, last = re.findall(r"[^.[\]]+", path)
    place: Any = document
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


def complaint(document: dict[str, Any]) -> str:
    with pytest.raises(BadSpecError) as refusal:
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


@pytest.mark.parametrize("milestone", [0, 0.5, True, "100"])
def test_a_milestone_that_is_not_a_step_is_refused(milestone: object) -> None:
    assert complaint(changed("schedule.milestones", [100, milestone])).startswith("schedule.milestones: ")


@pytest.mark.parametrize(
    "path", ["news", *sorted({re.sub(r"[^.]+$", "news", path) for path, _ in fields(SCHEMA) if "." in path})]
)
def test_a_field_of_a_later_version_is_refused_by_name(path: str) -> None:
    assert complaint(changed(path, "1")).startswith(f"{path}: unknown field")


def test_another_schema_version_is_refused_by_name() -> None:
    assert complaint(changed("schema", "runspec/v2")).endswith("got 'runspec/v2'")


@pytest.mark.parametrize("path", ["batch.global", "batch.perReplica", "batch.accumulation"])
def test_a_global_batch_that_is_not_replicas_times_per_replica_is_refused(path: str) -> None:
    assert complaint(changed(path, 127)).startswith("batch.global: 16 replicas x ")
