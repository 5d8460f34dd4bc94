"""From the run spec's JSON to RunSpec, or to a BadSpecError that names the field.

`runspec-v1.schema.json` is the written form; a test keeps this parser and the schema in agreement. What a schema cannot
say (replicas x perReplica x accumulation = global) is checked here, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_trainer.contract import RUN_SPEC_SCHEMA
from tpu_trainer.errors import BadSpecError
from tpu_trainer.spec.fields import Fields
from tpu_trainer.spec.model import (
    Batch,
    CheckpointSpec,
    JobRef,
    OnNotFinite,
    OptimizerSpec,
    ReportSpec,
    RunSpec,
    ScalingRow,
    ScheduleSpec,
    Slice,
    TorchSpec,
)

BACKENDS = ("xla", "xla-spmd", "torch")
SCHEDULES = ("Constant", "Linear", "Cosine", "Step")

LARGEST_SEED = 2**32 - 1
"""What every random generator a user may draw from can be seeded with; numpy's global one sets the limit."""


def read_run_spec(path: Path) -> RunSpec:
    """Reads and checks the run spec file.

    Raises:
        BadSpecError: the file is missing or not JSON, or a field is wrong; the text begins with the file's path.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise BadSpecError(f"run spec {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadSpecError(f"run spec {path}: not JSON: {error}") from error
    try:
        return parse_run_spec(document)
    except BadSpecError as error:
        raise BadSpecError(f"run spec {path}: {error}") from error


def parse_run_spec(document: object) -> RunSpec:
    """Checks a parsed JSON document against the run spec's schema and its own arithmetic.

    Raises:
        BadSpecError: the text is "<field path>: <what would be right>, got <what was found>".
    """
    # The schema's name goes first: in a document of another version every other complaint would mislead.
    if isinstance(document, Mapping) and document.get("schema") != RUN_SPEC_SCHEMA:
        raise BadSpecError(f'schema: this trainer reads "{RUN_SPEC_SCHEMA}", got {document.get("schema")!r}')
    root = Fields(document, "", _ROOT)
    assert isinstance(document, Mapping)
    entrypoint = root.text("entrypoint")
    module, colon, attribute = entrypoint.partition(":")
    if not (module and colon and attribute) or ":" in attribute:
        raise root.wrong("entrypoint", '"module:callable"')
    spec = RunSpec(
        job=_job(root.child("job", ("namespace", "name", "uid", "attempt"))),
        entrypoint=entrypoint,
        backend=root.choice("backend", BACKENDS),
        hardware=root.choice("hardware", ("TPU", "CPU")),
        slice=_slice(root.child("slice", ("generation", "topology", "slices", "hosts", "replicas"))),
        batch=_batch(root.child("batch", ("global", "perReplica", "accumulation"))),
        train_steps=root.integer("trainSteps", minimum=1),
        warmup_steps=root.integer("warmupSteps", minimum=0),
        schedule=_schedule(root.child("schedule", _SCHEDULE)) if root.has("schedule") else _CONSTANT,
        evaluate_every_steps=root.integer("evaluateEverySteps", minimum=1) if root.has("evaluateEverySteps") else None,
        ema_decay=root.decimal("emaDecay") if root.has("emaDecay") else None,
        dataset_size=root.integer("datasetSize", minimum=1) if root.has("datasetSize") else None,
        seed=root.integer("seed", minimum=0, maximum=LARGEST_SEED),
        optimizer=_optimizer(root.child("optimizer", _OPTIMIZER)),
        parameters=root.strings("parameters") if root.has("parameters") else {},
        data_uri=root.text("dataUri") if root.has("dataUri") else None,
        on_not_finite=_policy(root) if root.has("onNotFinite") else OnNotFinite.STOP,
        torch=_torch(root.child("torch", _TORCH)) if root.has("torch") else TorchSpec(),
        checkpoint=_checkpoint(root.child("checkpoint", _CHECKPOINT)) if root.has("checkpoint") else None,
        report=_report(root.child("report", _REPORT)) if root.has("report") else ReportSpec(),
        scaling=_scaling(root.children("scaling", _SCALING, _MOST_ROWS)) if root.has("scaling") else (),
        recipe=root.strings("recipe") if root.has("recipe") else {},
        document=document,
    )
    if root.has("torch") and spec.backend != "torch":
        raise BadSpecError(f'torch: goes with backend "torch" only, got backend "{spec.backend}"')
    _check_arithmetic(spec)
    _check_backend(spec)
    return spec


_ROOT = (
    "schema",
    "job",
    "entrypoint",
    "backend",
    "hardware",
    "slice",
    "batch",
    "trainSteps",
    "warmupSteps",
    "schedule",
    "evaluateEverySteps",
    "emaDecay",
    "onNotFinite",
    "datasetSize",
    "seed",
    "optimizer",
    "parameters",
    "dataUri",
    "torch",
    "checkpoint",
    "report",
    "scaling",
    "recipe",
)
_SCHEDULE = ("name", "milestones", "factor")
_CONSTANT = ScheduleSpec("Constant", (), None)
_OPTIMIZER = ("name", "learningRate", "momentum", "weightDecay", "beta1", "beta2", "epsilon")
_TORCH = ("device", "collectives", "processesPerHost")
_CHECKPOINT = ("uri", "everySteps", "everyMinutes", "keep", "resumeFrom")
_REPORT = ("uri", "tensorBoard", "gradientNoiseScale")
_SCALING = ("name", "tunedOn", "runsOn", "rule")
_MOST_ROWS = 64
_LONGEST_WORDS = 4096


def _job(fields: Fields) -> JobRef:
    return JobRef(
        namespace=fields.text("namespace"),
        name=fields.text("name"),
        uid=fields.text("uid"),
        attempt=fields.integer("attempt", minimum=0),
    )


def _slice(fields: Fields) -> Slice:
    return Slice(
        generation=fields.text("generation"),
        topology=fields.text("topology"),
        slices=fields.integer("slices", minimum=1),
        hosts=fields.integer("hosts", minimum=1),
        replicas=fields.integer("replicas", minimum=1),
    )


def _batch(fields: Fields) -> Batch:
    return Batch(
        total=fields.integer("global", minimum=1),
        per_replica=fields.integer("perReplica", minimum=1),
        accumulation=fields.integer("accumulation", minimum=1) if fields.has("accumulation") else 1,
    )


def _policy(fields: Fields) -> OnNotFinite:
    return OnNotFinite(fields.choice("onNotFinite", tuple(OnNotFinite)))


def _schedule(fields: Fields) -> ScheduleSpec:
    return ScheduleSpec(
        name=fields.choice("name", SCHEDULES),
        milestones=fields.integers("milestones", minimum=1) if fields.has("milestones") else (),
        factor=fields.decimal("factor") if fields.has("factor") else None,
    )


def _optimizer(fields: Fields) -> OptimizerSpec:
    def optional(name: str) -> float | None:
        return fields.decimal(name) if fields.has(name) else None

    return OptimizerSpec(
        name=fields.text("name"),
        learning_rate=fields.decimal("learningRate"),
        momentum=optional("momentum"),
        weight_decay=optional("weightDecay"),
        beta1=optional("beta1"),
        beta2=optional("beta2"),
        epsilon=optional("epsilon"),
    )


def _torch(fields: Fields) -> TorchSpec:
    return TorchSpec(
        device=fields.text("device"),
        collectives=fields.text("collectives"),
        processes_per_host=fields.integer("processesPerHost", minimum=1),
    )


def _checkpoint(fields: Fields) -> CheckpointSpec:
    return CheckpointSpec(
        uri=fields.text("uri"),
        every_steps=fields.integer("everySteps", minimum=1) if fields.has("everySteps") else None,
        every_minutes=fields.integer("everyMinutes", minimum=1) if fields.has("everyMinutes") else None,
        keep=fields.integer("keep", minimum=1),
        resume_from=fields.text("resumeFrom") if fields.has("resumeFrom") else None,
    )


def _report(fields: Fields) -> ReportSpec:
    return ReportSpec(
        uri=fields.text("uri") if fields.has("uri") else None,
        tensor_board=fields.flag("tensorBoard") if fields.has("tensorBoard") else False,
        gradient_noise_scale=fields.flag("gradientNoiseScale") if fields.has("gradientNoiseScale") else False,
    )


def _scaling(rows: Sequence[Fields]) -> tuple[ScalingRow, ...]:
    return tuple(
        ScalingRow(
            name=row.words("name", _LONGEST_WORDS),
            tuned_on=row.words("tunedOn", _LONGEST_WORDS),
            runs_on=row.words("runsOn", _LONGEST_WORDS),
            rule=row.words("rule", _LONGEST_WORDS),
        )
        for row in rows
    )


def _check_arithmetic(spec: RunSpec) -> None:
    replicas, hosts, slices = spec.slice.replicas, spec.slice.hosts, spec.slice.slices
    if hosts % slices:
        raise BadSpecError(f"slice.hosts: {hosts} hosts cannot be shared out evenly to {slices} slices")
    if replicas % hosts:
        raise BadSpecError(f"slice.replicas: {replicas} replicas cannot be shared out evenly to {hosts} hosts")
    made = replicas * spec.batch.per_replica * spec.batch.accumulation
    if made != spec.batch.total:
        times = f" x {spec.batch.accumulation} accumulated" if spec.batch.accumulation > 1 else ""
        raise BadSpecError(
            f"batch.global: {replicas} replicas x {spec.batch.per_replica} per replica{times} make {made}, "
            f"got {spec.batch.total}"
        )


def _check_backend(spec: RunSpec) -> None:
    replicas, hosts, per_host = spec.slice.replicas, spec.slice.hosts, spec.torch.processes_per_host
    if replicas % (hosts * per_host):
        raise BadSpecError(
            f"torch.processesPerHost: {replicas} replicas cannot be shared out evenly to {hosts} hosts x "
            f"{per_host} processes"
        )
    if (spec.backend, spec.hardware) == ("xla-spmd", "CPU") and hosts > 1:
        raise BadSpecError(
            f'backend: "xla-spmd" on hardware "CPU" runs on one host, because XLA\'s CPU client has no collectives '
            f'between processes, got {hosts} hosts; "xla" and "torch" run on several'
        )
    if spec.backend == "torch" and (spec.hardware == "TPU") != (spec.torch.device == "tpu"):
        raise BadSpecError(
            f'backend: "torch" with torch.device "{spec.torch.device}" does not run on hardware "{spec.hardware}"; '
            'there torch.device is "tpu" on "TPU" and any other on "CPU"'
        )
