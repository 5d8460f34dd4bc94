"""The run spec: one training run, fully resolved. The operator writes it, the trainer reads it, it never changes.

`runspec-v1.schema.json` is its written form, and a test keeps the two in agreement. Each field of the classes below
carries the reader of its JSON value. A field's JSON name is its name in camel case, unless its metadata gives another.
What a schema cannot express (replicas x perReplica x accumulation = global) is checked at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from tpu_contract.protocol import RUN_SPEC_SCHEMA
from tpu_contract.words import cut

BACKENDS = ("xla", "xla-spmd", "torch")

LARGEST_SEED = 2**32 - 1
"""The largest seed that every random generator accepts; numpy's global one sets the limit."""

NO_ENTRYPOINT = "trainer:command"
"""Stands for the entrypoint in a job with `trainer.command`."""

# With their defaults, too: loops of the users' own read them from the document.
_ALWAYS_WRITTEN = frozenset({"accumulation", "milestones", "parameters", "recipe", "scaling", "schedule"})

_MOST_ROWS = 64
_LONGEST_WORDS = 4096

WARNING_ROW = "warning"
"""The name of the rows of `scaling` whose rule is a warning of the plan."""

# The same pattern as in runspec-v1.schema.json. ASCII digits only: \d would also match other scripts' digits.
_DECIMAL = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Loop(StrEnum):
    BUILT_IN = "BuiltIn"
    LIGHTNING = "Lightning"


class Execution(StrEnum):
    COMPILE = "Compile"
    FUSE = "Fuse"
    EAGER = "Eager"


class ScheduleName(StrEnum):
    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"
    STEP = "Step"
    PLATEAU = "Plateau"


class Precision(StrEnum):
    FLOAT32 = "Float32"
    BFLOAT16_MIXED = "BFloat16Mixed"
    BFLOAT16 = "BFloat16"


class Sharding(StrEnum):
    REPLICATED = "Replicated"
    OPTIMIZER = "Optimizer"


class Mode(StrEnum):
    """Which values of a metric are better."""

    MAX = "Max"
    MIN = "Min"


class NotFinitePolicy(StrEnum):
    """What to do about a step whose loss or gradients are not finite. Stop: fail the run. Skip: leave the step out.
    Warn: make the step."""

    STOP = "Stop"
    SKIP = "Skip"
    WARN = "Warn"


class RunSpecError(ValueError):
    """A run spec that has another schema, or contradicts itself."""


T = TypeVar("T")
Reader = Callable[[object, str], Any]
"""(JSON value, field path) -> value; raises RunSpecError: "<path>: expected <what would be right>, got <the value>"."""


def _wrong(path: str, expected: str, value: object) -> RunSpecError:
    return RunSpecError(f"{path}: expected {expected}, got {cut(repr(value), 60)}")


def _text(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(path, "a non-empty string", value)
    return value


def _sha256(value: object, path: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise _wrong(path, "64 hexadecimal digits", value)
    return value


def _words(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_WORDS:
        raise _wrong(path, f"a string of at most {_LONGEST_WORDS} characters", value)
    return value


def _entrypoint(value: object, path: str) -> str:
    module, _, attribute = _text(value, path).partition(":")
    if not (module and attribute) or ":" in attribute:
        raise _wrong(path, '"module:callable"', value)
    return str(value)


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(path, "true or false", value)
    return value


def _integer(minimum: int, maximum: float = math.inf) -> Reader:
    def read(value: object, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            upper = "" if maximum == math.inf else f" and at most {maximum}"
            raise _wrong(path, f"an integer of at least {minimum}{upper}", value)
        return value

    return read


def _decimal(value: object, path: str) -> float:
    """Reads a non-negative real number from a string, as Kubernetes objects carry them."""
    if not isinstance(value, str) or not _DECIMAL.fullmatch(value) or math.isinf(float(value)):
        raise _wrong(path, 'a decimal string such as "0.1" or "1e-4"', value)
    return float(value)


def _positive(value: object, path: str) -> float:
    if not (number := _decimal(value, path)):
        raise _wrong(path, 'a decimal string above 0, such as "1.0"', value)
    return number


def _choice(kind: Callable[[str], Any], allowed: Sequence[str]) -> Reader:
    def read(value: object, path: str) -> Any:
        if not isinstance(value, str) or value not in allowed:
            raise _wrong(path, " or ".join(f'"{name}"' for name in allowed), value)
        return kind(value)

    return read


def _steps(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(step) is int and step >= 1 for step in value):
        raise _wrong(path, "a list of integers of at least 1", value)
    return tuple(value)


def _strings(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object of strings", value)
    for key, entry in value.items():
        if not isinstance(entry, str):
            raise _wrong(f"{path}.{key}", "a string", entry)
    return dict(value)


def _rows(value: object, path: str) -> tuple[ScalingRow, ...]:
    if not isinstance(value, list) or len(value) > _MOST_ROWS or not all(isinstance(row, Mapping) for row in value):
        raise _wrong(path, f"a list of at most {_MOST_ROWS} objects", value)
    return tuple(_object(ScalingRow, row, f"{path}[{index}]") for index, row in enumerate(value))


Text = Annotated[str, _text]
Words = Annotated[str, _words]
Count = Annotated[int, _integer(1)]
Natural = Annotated[int, _integer(0)]
Decimal = Annotated[float, _decimal]
Flag = Annotated[bool, _flag]
Strings = Annotated[Mapping[str, str], _strings]


@dataclass(frozen=True)
class JobRef:
    """Which run of which job this is; `uid` and `attempt` together identify one gang."""

    namespace: Text
    name: Text
    uid: Text
    attempt: Natural

    @property
    def gang(self) -> str:
        return f"{self.uid}/{self.attempt}"


@dataclass(frozen=True)
class SliceSpec:
    """The hardware the recipe was scaled to; `hosts` and `replicas` count the whole job, all slices together."""

    generation: Text
    topology: Text
    slices: Count
    hosts: Count
    replicas: Count


@dataclass(frozen=True)
class BatchSpec:
    """Examples per step of the whole job; a replica takes `per_replica` of them at once, `accumulation` times."""

    total: Count = field(metadata={"json": "global"})
    per_replica: Count
    accumulation: Count = 1


ModeField = Annotated[Mode, _choice(Mode, tuple(Mode))]


@dataclass(frozen=True)
class ScheduleSpec:
    """The learning rate after warm-up.

    name: "Constant", "Linear", "Cosine", "Step" or "Plateau".
    milestones: the steps after which "Step" multiplies the rate by `factor`.
    factor: as in the recipe; None if the recipe does not set it.
    metric: what "Plateau" follows; None with the others.
    mode: for "Plateau", "Min" if lower values are better, "Max" if higher ones are; None with the others.
    patience: for "Plateau", in evaluations; None with the others.
    """

    name: Annotated[str, _choice(str, tuple(ScheduleName))]
    milestones: Annotated[tuple[int, ...], _steps] = ()
    factor: Decimal | None = None
    metric: Text | None = None
    mode: ModeField | None = None
    patience: Count | None = None


@dataclass(frozen=True)
class StopSpec:
    """When evaluations end the training: after `patience` of them in a row without a value that is better by more than
    `min_delta`."""

    metric: Text
    mode: ModeField
    patience: Count
    min_delta: Decimal | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer's name and its values; None where the recipe does not set one."""

    name: Text
    learning_rate: Decimal
    momentum: Decimal | None
    weight_decay: Decimal | None
    beta1: Decimal | None
    beta2: Decimal | None
    epsilon: Decimal | None


@dataclass(frozen=True)
class TorchSpec:
    """What the torch backend runs on: a torch device type, the process group's backend, and processes per host.

    ("cuda", "nccl") is GPUs, ("tpu", "tpu_dist") is TorchTPU. execution: how the device gets a step, an Execution.
    """

    device: Text
    collectives: Text
    processes_per_host: Count
    execution: Annotated[str, _choice(str, tuple(Execution))] = Execution.EAGER


@dataclass(frozen=True)
class BestSpec:
    """The metric of the evaluations by which a checkpoint is the best."""

    metric: Text
    mode: ModeField


@dataclass(frozen=True)
class InitSpec:
    """Weights to begin with: a folder of checkpoints, a single checkpoint, or a .safetensors file. `strict`: all
    tensors there and in the model must match."""

    uri: Text
    strict: Flag = True


@dataclass(frozen=True)
class CheckpointSpec:
    """Where checkpoints go and how often: after so many steps or seconds, whichever comes first.

    With neither, a checkpoint is written only when the run is stopped or ends. `keep`: how many committed ones stay.
    `uri`: a folder of this job alone; `resume_from`: where the job begins while that folder is empty; `init_from`: the
    weights with which it then begins at step 0; `rungs`: a prefix, below which everything that the lower rungs of a
    ladder left is removed once the training has succeeded.
    """

    uri: Text
    every_steps: Count | None
    every_seconds: Count | None
    keep: Count
    keep_best: BestSpec | None = None
    resume_from: Text | None = None
    init_from: InitSpec | None = None
    rungs: Text | None = None


@dataclass(frozen=True)
class CodeSpec:
    """The user's code as a .tar.gz: gs://..., an absolute path, or secret://NAME, which is mounted. `sha256`: the
    archive's checksum."""

    uri: Text
    sha256: Annotated[str, _sha256]


@dataclass(frozen=True)
class ProfileSpec:
    """How many steps a profiler trace captures."""

    steps: Count


@dataclass(frozen=True)
class ReportSpec:
    """The report that is written besides the model; without `uri` it goes to the directory that the environment names,
    if any."""

    uri: Text | None = None
    tensor_board: Flag = False
    gradient_noise_scale: Flag = False
    profile: ProfileSpec | None = None


@dataclass(frozen=True)
class ScalingRow:
    """One number as tuned and as it runs here, as text for people: "-" for none; `rule` may be empty."""

    name: Words
    tuned_on: Words
    runs_on: Words
    rule: Words


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run, fully resolved: the trainer has nothing left to derive.

    `recipe`: what the user wrote, by field path; only compared, to see whether two jobs train the same.
    `ada_scale_batch_size`: the recipe's batch, to which AdaScale's gains are relative; None without AdaScale. With it
    `train_steps`, `warmup_steps` and milestones are the recipe's, and the run ends once the gains add up to them.
    `dataset_size`: the examples that `train_steps` were derived from, None if steps were given.
    `end_after_steps`: for a rung of a ladder, which makes only the first steps of its training; None elsewhere.
    `judge_after_steps`: for the job on top of a ladder, which says what it has measured in its first steps and goes on.
    `checked_program`: the digest of the step's program that the entry check has compiled for this slice.
    `slice_check`: the gang checks its slice first; a trainer that cannot do so does not know the field, and refuses it.
    `document`: the JSON it was read from, which the history of the run records.
    """

    job: JobRef
    entrypoint: Annotated[str, _entrypoint]
    loop: Annotated[str, _choice(str, tuple(Loop))] = Loop.BUILT_IN
    backend: Annotated[str, _choice(str, BACKENDS)]
    hardware: Annotated[str, _choice(str, ("TPU", "CPU"))]
    slice: SliceSpec
    batch: BatchSpec
    train_steps: Count
    end_after_steps: Count | None = None
    judge_after_steps: Count | None = None
    warmup_steps: Natural
    schedule: ScheduleSpec = ScheduleSpec("Constant")
    ada_scale_batch_size: Count | None = None
    evaluate_every_steps: Count | None
    stop_early: StopSpec | None = None
    ema_decay: Decimal | None
    on_not_finite: Annotated[NotFinitePolicy, _choice(NotFinitePolicy, tuple(NotFinitePolicy))] = NotFinitePolicy.STOP
    gradient_clip_norm: Annotated[float, _positive] | None = None
    precision: Annotated[str, _choice(str, tuple(Precision))] = Precision.FLOAT32
    sharding: Annotated[str, _choice(str, tuple(Sharding))] = Sharding.REPLICATED
    dataset_size: Count | None = None
    seed: Annotated[int, _integer(0, LARGEST_SEED)]
    optimizer: OptimizerSpec
    parameters: Strings = field(default_factory=dict)
    data_uri: Text | None
    torch: TorchSpec = TorchSpec("cpu", "gloo", 1)
    code: CodeSpec | None = None
    checkpoint: CheckpointSpec | None = None
    report: ReportSpec = ReportSpec()
    checked_program: Text | None = None
    slice_check: Flag = False
    scaling: Annotated[tuple[ScalingRow, ...], _rows] = ()
    recipe: Strings = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False, metadata={"json": None})

    @property
    def last_step(self) -> int:
        """The step after which this run is done."""
        return self.train_steps if self.end_after_steps is None else min(self.end_after_steps, self.train_steps)

    @property
    def process_per_device(self) -> bool:
        """Whether a host of this run may be more than one process: only PJRT knows how many chips there are.

        Always true with TorchTPU, whose processes take their layout from a parent, even a single one.
        """
        if self.backend == "torch":
            return self.torch.processes_per_host > 1 or self.torch.device == "tpu"
        return self.backend == "xla" and self.hardware == "TPU"


def parse_run_spec(document: object, *, own_loop: bool = False) -> RunSpec:
    """Checks a parsed JSON document against the run spec's schema and its own arithmetic.

    Raises:
        RunSpecError: the text is "<field path>: <what would be right>, got <what is there>".
    """
    if not isinstance(document, Mapping):
        raise _wrong("the document", "an object", document)
    # First, because any other complaint about a document of another version would mislead.
    if document.get("schema") != RUN_SPEC_SCHEMA:
        raise RunSpecError(f'schema: this trainer reads "{RUN_SPEC_SCHEMA}", got {document.get("schema")!r}')
    values = {name: value for name, value in document.items() if name != "schema"}
    spec = _object(RunSpec, {"entrypoint": NO_ENTRYPOINT, **values} if own_loop else values, "")
    spec = replace(spec, document=document)
    if "torch" in document and spec.backend != "torch":
        raise RunSpecError(f'torch: goes with backend "torch" only, got backend "{spec.backend}"')
    _check_arithmetic(spec)
    _check_combinations(spec)
    _check_backend(spec)
    return spec


def run_spec_document(spec: RunSpec) -> dict[str, Any]:
    """Returns the JSON document that `parse_run_spec` reads as this run spec.

    It leaves out most of what has its default, because an image that is older than a field refuses it.
    """
    document = {"schema": RUN_SPEC_SCHEMA, **_written(spec)}
    if spec.entrypoint == NO_ENTRYPOINT:
        del document["entrypoint"]
    return document


def _written(value: Any) -> Any:
    """Returns a value as JSON has it: numbers that are not whole are texts, as Kubernetes objects carry them."""
    if known := _parts(value.__class__):
        parts = ((name, getattr(value, part), default) for part, name, default in known)
        return {name: _written(part) for name, part, default in parts if part is not None and part != default}
    if isinstance(value, tuple):
        return [_written(part) for part in value]
    return repr(value) if isinstance(value, float) else dict(value) if isinstance(value, Mapping) else value


@lru_cache(None)
def _parts(kind: type[Any]) -> tuple[tuple[str, str, Any], ...]:
    """Returns a dataclass's fields that are in the document: name, name there, and default; none for another type."""
    known = fields(kind) if is_dataclass(kind) else ()
    return tuple((part.name, name, _default(part)) for part in known if (name := _json_name(part)))


def _default(part: Field[Any]) -> Any:
    """Returns the value with which the field is left out."""
    if part.name in _ALWAYS_WRITTEN:
        return MISSING
    return part.default if part.default_factory is MISSING else part.default_factory()


def _json_name(part: Field[Any]) -> str | None:
    """Returns the field's name in the document; None for a field that is not in it."""
    name: str | None = part.metadata.get("json", _camel_case(part.name))
    return name


def _object(kind: type[T], value: object, path: str) -> T:
    """Reads a JSON object as the dataclass `kind`. A field may be missing if it has a default or may be None."""
    if not isinstance(value, Mapping):
        raise _wrong(path or "the document", "an object", value)
    assert is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    known = {name: part for part in fields(kind) if (name := _json_name(part))}
    for name in value:
        if name not in known:
            raise RunSpecError(f"{_at(path, name)}: unknown field; known here: {', '.join(known)}")
    read: dict[str, Any] = {}
    for name, part in known.items():
        kinds = [hints[part.name]] if NoneType not in get_args(hints[part.name]) else [*get_args(hints[part.name])]
        if name in value:
            read[part.name] = _value(kinds[0], value[name], _at(path, name))
        elif part.default is MISSING and part.default_factory is MISSING:
            if NoneType not in kinds:
                raise RunSpecError(f"{_at(path, name)}: missing")
            read[part.name] = None
    return kind(**read)


def _value(kind: Any, value: object, path: str) -> Any:
    if get_origin(kind) is Annotated:
        return get_args(kind)[1](value, path)
    return _object(kind, value, path)


def _at(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _check_arithmetic(spec: RunSpec) -> None:
    replicas, hosts, slices = spec.slice.replicas, spec.slice.hosts, spec.slice.slices
    if hosts % slices:
        raise RunSpecError(f"slice.hosts: {hosts} hosts cannot be divided evenly among {slices} slices")
    if replicas % hosts:
        raise RunSpecError(f"slice.replicas: {replicas} replicas cannot be divided evenly among {hosts} hosts")
    made = replicas * spec.batch.per_replica * spec.batch.accumulation
    if made != spec.batch.total:
        times = f" x {spec.batch.accumulation} accumulated" if spec.batch.accumulation > 1 else ""
        raise RunSpecError(
            f"batch.global: {replicas} replicas x {spec.batch.per_replica} per replica{times} make {made}, "
            f"got {spec.batch.total}"
        )


def _check_combinations(spec: RunSpec) -> None:
    """Raises RunSpecError for fields that contradict each other, though each is right alone."""
    schedule, checkpoint = spec.schedule, spec.checkpoint
    present = (schedule.metric is not None, schedule.mode is not None, schedule.patience is not None)
    if present != (schedule.name == "Plateau",) * 3:
        raise RunSpecError(
            f'schedule: "Plateau" alone takes metric, mode and patience, and needs all three, got "{schedule.name}" '
            f"with {sum(present)} of them"
        )
    if checkpoint is not None and checkpoint.resume_from is not None and checkpoint.init_from is not None:
        raise RunSpecError("checkpoint: resumeFrom or initFrom, got both")
    if checkpoint is not None and checkpoint.rungs is not None:
        prefix = f"{checkpoint.uri}.rungs/"
        if not checkpoint.rungs.startswith(prefix) or checkpoint.rungs == prefix:
            raise RunSpecError(f"checkpoint.rungs: must be a place below {prefix}, got {checkpoint.rungs!r}")


def _check_backend(spec: RunSpec) -> None:
    replicas, hosts, per_host = spec.slice.replicas, spec.slice.hosts, spec.torch.processes_per_host
    if replicas % (hosts * per_host):
        raise RunSpecError(
            f"torch.processesPerHost: {replicas} replicas cannot be divided evenly among {hosts} hosts x "
            f"{per_host} processes"
        )
    if (spec.backend, spec.hardware) == ("xla-spmd", "CPU") and hosts > 1:
        raise RunSpecError(
            f'backend: "xla-spmd" on hardware "CPU" runs on one host, because XLA\'s CPU client has no collectives '
            f'between processes, got {hosts} hosts; "xla" and "torch" run on several'
        )
    if spec.backend == "torch" and (spec.hardware == "TPU") != (spec.torch.device == "tpu"):
        raise RunSpecError(
            f'backend: "torch" with torch.device "{spec.torch.device}" does not run on hardware "{spec.hardware}"; '
            'torch.device is "tpu" on hardware "TPU" and any other on "CPU"'
        )
    if spec.torch.execution == "Fuse" and spec.torch.device != "tpu":
        raise RunSpecError(
            f'torch.execution: "Fuse" is a mode of TorchTPU and needs torch.device "tpu", got "{spec.torch.device}"'
        )
