"""Builds the run spec, `runspec/v1`, which the trainer reads. A JSON schema in `tpu_contract` describes it.

A loop of the user's own gets the same file, without an entrypoint.
"""

import json
from collections.abc import Iterator
from typing import Any

from tpu_contract.protocol import RUN_SPEC_SCHEMA
from tpu_training_operator.api.job import Checkpoint, TPUTrainingJob
from tpu_training_operator.api.recipe import OnNotFinite, Optimizer, Precision, Recipe, Schedule, ScheduleName, Sharding
from tpu_training_operator.api.trainer import Backend, Execution, Loop, TorchRuntime
from tpu_training_operator.domain.job.recipe.checkpointing import folder, interval, left_by_rungs
from tpu_training_operator.domain.job.recipe.comparison import ComparisonRow, comparison
from tpu_training_operator.domain.job.recipe.resolve import LowerRung, Resolution
from tpu_training_operator.domain.job.recipe.scale import ScaledRecipe

_BACKENDS = {Backend.XLA: "xla", Backend.XLA_SPMD: "xla-spmd", Backend.TORCH: "torch"}


def run_spec(job: TPUTrainingJob, resolution: Resolution, attempt: int) -> dict[str, Any]:
    """Returns the run spec of one attempt, which all its workers share."""
    layout, recipe, spec = resolution.layout, resolution.recipe, job.spec
    document: dict[str, Any] = {
        "schema": RUN_SPEC_SCHEMA,
        "job": {"namespace": job.namespace, "name": job.name, "uid": job.uid, "attempt": attempt},
        "backend": _BACKENDS[spec.trainer.backend],
        "hardware": spec.slice.hardware.value,
        "slice": {
            "generation": layout.shape.generation,
            "topology": layout.shape.topology,
            "slices": layout.slices,
            "hosts": layout.hosts,
            "replicas": layout.replicas,
        },
        "batch": {
            "global": recipe.batch.total,
            "perReplica": recipe.batch.per_replica,
            "accumulation": recipe.batch.accumulation,
        },
        "trainSteps": recipe.train_steps,
        "warmupSteps": recipe.warmup_steps,
        "schedule": _schedule(spec.recipe.schedule, recipe),
        "seed": spec.recipe.seed,
        "optimizer": _optimizer(spec.recipe.optimizer, recipe),
        "parameters": dict(sorted((spec.recipe.parameters or {}).items())),
        "recipe": dict(_list_fields(spec.recipe)),
        "scaling": [_scaling(row) for row in comparison(spec.recipe, resolution)],
    }
    if spec.trainer.entrypoint is not None:
        document["entrypoint"] = spec.trainer.entrypoint
    # Left out if it is the default, because an older image refuses unknown fields.
    if spec.trainer.loop is not Loop.BUILT_IN:
        document["loop"] = spec.trainer.loop.value
    if recipe.evaluate_every_steps is not None:
        document["evaluateEverySteps"] = recipe.evaluate_every_steps
    if recipe.ema_decay is not None:
        document["emaDecay"] = recipe.ema_decay
    if spec.recipe.stop_early is not None:
        document["stopEarly"] = spec.recipe.stop_early.model_dump(by_alias=True, exclude_none=True, mode="json")
    if spec.recipe.on_not_finite is not OnNotFinite.STOP:
        document["onNotFinite"] = spec.recipe.on_not_finite.value
    if spec.recipe.gradient_clip_norm is not None:
        document["gradientClipNorm"] = spec.recipe.gradient_clip_norm
    if spec.recipe.precision is not Precision.FLOAT32:
        document["precision"] = spec.recipe.precision.value
    if spec.recipe.sharding is not Sharding.REPLICATED:
        document["sharding"] = spec.recipe.sharding.value
    if spec.recipe.dataset_size is not None:
        document["datasetSize"] = spec.recipe.dataset_size
    if spec.data is not None:
        document["dataUri"] = spec.data.uri
    if spec.trainer.torch is not None:
        document["torch"] = _torch(spec.trainer.torch)
    if spec.trainer.code is not None:
        document["code"] = spec.trainer.code.model_dump()
    if spec.checkpoint is not None:
        document["checkpoint"] = _checkpoint(job, spec.checkpoint)
        if (lower_rungs := left_by_rungs(job)) is not None:
            document["checkpoint"]["rungs"] = lower_rungs
    if resolution.lower_rung is not None:
        document |= _lower_rung(resolution.lower_rung, attempt)
    if spec.report is not None:
        document["report"] = spec.report.model_dump(by_alias=True, exclude_none=True)
    return document


def _torch(torch: TorchRuntime) -> dict[str, Any]:
    # TorchTPU reads the compile cache from a variable (worker_env).
    document = torch.model_dump(by_alias=True, mode="json", exclude={"compile_cache"})
    # An older image refuses unknown fields.
    if torch.execution is Execution.EAGER:
        del document["execution"]
    return document


def _lower_rung(lower_rung: LowerRung, attempt: int) -> dict[str, Any]:
    """Returns the fields that a lower rung of the ladder replaces."""
    document: dict[str, Any] = {"endAfterSteps": lower_rung.steps}
    if (uri := lower_rung.folder(attempt)) is not None:
        # Without an interval there is one checkpoint, at the end.
        document["checkpoint"] = {"uri": uri, "keep": 1}
        if lower_rung.init_from is not None:
            document["checkpoint"]["initFrom"] = lower_rung.init_from.model_dump()
    return document


def _checkpoint(job: TPUTrainingJob, checkpoint: Checkpoint) -> dict[str, Any]:
    document = {"uri": folder(job, checkpoint), "keep": checkpoint.keep, **interval(checkpoint)}
    if checkpoint.keep_best is not None:
        document["keepBest"] = checkpoint.keep_best.model_dump(mode="json")
    if checkpoint.resume_from is not None:
        document["resumeFrom"] = checkpoint.resume_from
    if checkpoint.init_from is not None:
        document["initFrom"] = checkpoint.init_from.model_dump()
    return document


# Fields that do not affect the weights, or that the run spec already has elsewhere: the parameters may take half a
# megabyte.
_NOT_COMPARED = {"parameters", "evaluate_every_steps", "gradient_noise_scale", "sharding"}


def _list_fields(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Lists the user's recipe by field path. It leaves out defaults, so that a field that a later version adds does not
    make the same recipe look different."""
    # A schedule or an early stop that follows the evaluations depends on how often they happen.
    followed = recipe.stop_early is not None or recipe.schedule.name is ScheduleName.PLATEAU
    left_out = _NOT_COMPARED - {"evaluate_every_steps"} if followed else _NOT_COMPARED
    fields = recipe.model_dump(by_alias=True, exclude_defaults=True, exclude=left_out, mode="json")
    return _leaves("recipe", fields)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}", below)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _optimizer(optimizer: Optimizer, recipe: ScaledRecipe) -> dict[str, str]:
    scaled = {"learningRate": recipe.learning_rate, "weightDecay": recipe.weight_decay, **recipe.betas}
    fields = optimizer.model_dump(by_alias=True, exclude_none=True)
    return fields | {name: value for name, value in scaled.items() if value is not None}


def _scaling(row: ComparisonRow) -> dict[str, str]:
    return {"name": row.name, "tunedOn": row.tuned_on, "runsOn": row.runs_on, "rule": row.rule}


def _schedule(schedule: Schedule, recipe: ScaledRecipe) -> dict[str, Any]:
    """Returns the schedule with milestones in steps, the only unit that the trainer knows."""
    fields = schedule.model_dump(by_alias=True, exclude_none=True, exclude={"milestone_epochs"}, mode="json")
    return fields | {"milestones": list(recipe.milestones)}
