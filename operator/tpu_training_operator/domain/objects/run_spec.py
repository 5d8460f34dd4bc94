"""Builds the run spec, which the trainer reads. A loop of the user's own gets the same file, without an entrypoint."""

import json
from collections.abc import Iterator
from typing import Any

from tpu_contract import run_spec as contract
from tpu_contract.words import cut
from tpu_training_operator.api.job import InitFrom, TPUTrainingJob
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import SliceCheckPolicy
from tpu_training_operator.api.status import LONGEST_TEXT
from tpu_training_operator.api.trainer import BackendName
from tpu_training_operator.domain.job.recipe.adascale import is_adaptive
from tpu_training_operator.domain.job.recipe.checkpointing import folder, interval, left_by_rungs
from tpu_training_operator.domain.job.recipe.comparison import comparison
from tpu_training_operator.domain.job.recipe.resolve import LowerRung, Resolution
from tpu_training_operator.domain.job.recipe.scale import ScaledRecipe

_BACKENDS = {BackendName.XLA: "xla", BackendName.XLA_SPMD: "xla-spmd", BackendName.TORCH: "torch"}


def run_spec(
    job: TPUTrainingJob, resolution: Resolution, attempt: int, checked_program: str | None = None
) -> dict[str, Any]:
    """Returns the run spec of one attempt, which all its workers share. `checked_program`: the digest of the step's
    program that was compiled for this slice."""
    run = replace(_own_run(job, resolution, attempt), checked_program=checked_program)
    if resolution.lower_rung is not None:
        run = _lower_rung(run, resolution.lower_rung, attempt)
    return contract.run_spec_document(run)


def _own_run(job: TPUTrainingJob, resolution: Resolution, attempt: int) -> contract.RunSpec:
    layout, scaled, spec = resolution.layout, resolution.recipe, job.spec
    recipe, trainer, report = spec.recipe, spec.trainer, spec.report
    torch, code = trainer.torch, trainer.code
    return contract.RunSpec(
        job=contract.JobRef(job.namespace, job.name, job.uid, attempt),
        entrypoint=trainer.entrypoint or contract.NO_ENTRYPOINT,
        loop=trainer.loop,
        backend=_BACKENDS[trainer.backend],
        hardware=spec.slice.hardware,
        slice=contract.SliceSpec(
            layout.shape.generation, layout.shape.topology, layout.slices, layout.hosts, layout.replicas
        ),
        batch=contract.BatchSpec(scaled.batch.total, scaled.batch.per_replica, scaled.batch.accumulation),
        train_steps=scaled.train_steps,
        judge_after_steps=None if resolution.judged is None else resolution.judged.steps,
        warmup_steps=scaled.warmup_steps,
        schedule=_schedule(recipe, scaled),
        ada_scale_batch_size=recipe.global_batch_size if is_adaptive(recipe) else None,
        evaluate_every_steps=scaled.evaluate_every_steps,
        stop_early=_stop_early(recipe, scaled),
        ema_decay=_number(scaled.ema_decay),
        on_not_finite=recipe.on_not_finite,
        gradient_clip_norm=_number(recipe.gradient_clip_norm),
        precision=recipe.precision,
        sharding=recipe.sharding,
        dataset_size=recipe.dataset_size,
        seed=recipe.seed,
        optimizer=_optimizer(recipe, scaled),
        parameters=dict(sorted((recipe.parameters or {}).items())),
        data_uri=None if spec.data is None else spec.data.uri,
        code=None if code is None else contract.CodeSpec(code.uri, code.sha256),
        # TorchTPU reads the compile cache from a variable (worker_env).
        torch=contract.RunSpec.torch
        if torch is None
        else contract.TorchSpec(torch.device, torch.collectives, torch.processes_per_host, torch.execution),
        checkpoint=_checkpoint(job),
        report=contract.RunSpec.report
        if report is None
        else contract.ReportSpec(
            report.uri,
            report.tensor_board,
            report.gradient_noise_scale,
            None if report.profile is None else contract.ProfileSpec(report.profile.steps),
        ),
        slice_check=spec.run_policy.slice_check is SliceCheckPolicy.CHECK,
        scaling=(*comparison(recipe, resolution), *map(_warning, resolution.warnings)),
        recipe=dict(_list_fields(recipe)),
    )


def _warning(text: str) -> contract.ScalingRow:
    """Returns a warning of the plan as the row that the report shows among its warnings."""
    return contract.ScalingRow(contract.WARNING_ROW, "", "", cut(text, LONGEST_TEXT))


def _lower_rung(run: contract.RunSpec, rung: LowerRung, attempt: int) -> contract.RunSpec:
    """Returns the run with the fields that a lower rung of the ladder replaces; it measures the noise scale for the
    rungs above."""
    run = replace(run, end_after_steps=rung.steps, report=replace(run.report, gradient_noise_scale=True))
    if (uri := rung.folder(attempt)) is None:
        return run
    # Without an interval there is one checkpoint, at the end.
    return replace(run, checkpoint=contract.CheckpointSpec(uri, None, None, 1, init_from=_init(rung.init_from)))


def _checkpoint(job: TPUTrainingJob) -> contract.CheckpointSpec | None:
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        return None
    every, best = interval(checkpoint), checkpoint.keep_best
    return contract.CheckpointSpec(
        uri=folder(job, checkpoint),
        every_steps=every.get("everySteps"),
        every_seconds=every.get("everySeconds"),
        keep=checkpoint.keep,
        keep_best=None if best is None else contract.BestSpec(best.metric, best.mode),
        resume_from=checkpoint.resume_from,
        init_from=_init(checkpoint.init_from),
        rungs=left_by_rungs(job),
    )


def _init(weights: InitFrom | None) -> contract.InitSpec | None:
    return None if weights is None else contract.InitSpec(weights.uri, weights.strict)


# Fields that do not affect the weights, or that the run spec already has elsewhere: the parameters may take half a
# megabyte.
_EVALUATIONS = {"evaluate_every_steps", "evaluate_every_epochs"}
_NOT_COMPARED = {"parameters", "sharding", *_EVALUATIONS}


def _list_fields(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Lists the user's recipe by field path. It leaves out defaults, so that a field that a later version adds does not
    make the same recipe look different."""
    # A schedule or an early stop that follows the evaluations depends on how often they happen.
    followed = recipe.stop_early is not None or recipe.schedule.name is contract.ScheduleName.PLATEAU
    left_out = _NOT_COMPARED - _EVALUATIONS if followed else _NOT_COMPARED
    fields = recipe.model_dump(by_alias=True, exclude_defaults=True, exclude=left_out, mode="json")
    return _leaves("recipe", fields)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}", below)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _optimizer(recipe: Recipe, scaled: ScaledRecipe) -> contract.OptimizerSpec:
    optimizer = recipe.optimizer
    return contract.OptimizerSpec(
        name=optimizer.name,
        learning_rate=float(scaled.learning_rate),
        momentum=_number(optimizer.momentum),
        weight_decay=_number(scaled.weight_decay),
        beta1=_number(scaled.betas.get("beta1", optimizer.beta1)),
        beta2=_number(scaled.betas.get("beta2", optimizer.beta2)),
        epsilon=_number(scaled.epsilon),
    )


def _schedule(recipe: Recipe, scaled: ScaledRecipe) -> contract.ScheduleSpec:
    """Returns the schedule with milestones in steps, the only unit that the trainer knows."""
    schedule = recipe.schedule
    factor = _number(schedule.factor)
    return contract.ScheduleSpec(
        schedule.name, scaled.milestones, factor, schedule.metric, schedule.mode, scaled.plateau_patience
    )


def _stop_early(recipe: Recipe, scaled: ScaledRecipe) -> contract.StopSpec | None:
    stop = recipe.stop_early
    if stop is None or scaled.stop_patience is None:
        return None
    return contract.StopSpec(stop.metric, stop.mode, scaled.stop_patience, _number(stop.min_delta))


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)
