"""The TPUTrainingJob itself: what its spec consists of, and the rules over the whole object."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.alias_generators import to_camel

from tpu_contract.run_spec import Loop, Mode, Sharding
from tpu_training_operator.api import constants
from tpu_training_operator.api.constants import MAX_HOST_NAMES_LENGTH, MAX_HOSTS, MAX_JOB_NAME_LENGTH, TPU_RESOURCE
from tpu_training_operator.api.entry_check import CompileCheck, EntryCheck
from tpu_training_operator.api.ladder import Begin, Ladder
from tpu_training_operator.api.model import (
    ApiModel,
    Boolean,
    ControllerName,
    Count,
    LargeCount,
    MetricName,
    Rule,
    StorageUri,
)
from tpu_training_operator.api.placement import PlacementPolicy, ReturnToPreferred
from tpu_training_operator.api.recipe import LearningRateScaling, Recipe
from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.api.slice import (
    WITHOUT_TORCH_TPU,
    Hardware,
    Slice,
    cel_chips,
    cel_generation_is,
    cel_hosts_per_slice,
    cel_list,
    is_generation,
    requested_chips,
    requested_hosts_per_slice,
)
from tpu_training_operator.api.trainer import BackendName, Trainer, amounts_of, cel_asks_for


class Data(ApiModel):
    uri: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Location of the training data. The task receives it; every worker has it as TPUJOB_DATA_URI."
    )


class KeepBest(ApiModel):
    metric: MetricName = Field(description="Metric of the task's evaluation that decides, for example accuracy.")
    mode: Mode = Field(description="Which values of metric are better: Max or Min.")


class InitFrom(ApiModel):
    uri: StorageUri = Field(
        description="Another job's folder, for its newest clean checkpoint, one checkpoint in it (.../step-...), or a"
        " file that ends with .safetensors."
    )
    strict: Boolean = Field(
        True,
        description="Fail unless the tensors there and in the model are the same by name and shape. False: load those"
        " that match, and warn of the others; if none matches, the job fails.",
    )


class Checkpoint(ApiModel):
    """The intervals are not scaled with the slice, because they bound the time that a restart loses."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.resumeFrom) || !has(self.initFrom)",
            message="give resumeFrom or initFrom, not both: resumeFrom continues a training, initFrom begins one with"
            " given weights",
            holds=lambda checkpoint: checkpoint.resume_from is None or checkpoint.init_from is None,
            field="initFrom",
        ),
    )

    uri: StorageUri = Field(
        description="Where checkpoints are kept: gs://bucket/path, or an absolute path on a shared volume. Several jobs"
        " may share it; each writes to NAMESPACE/NAME below it."
    )
    every_steps: LargeCount | None = Field(
        None, description="Steps between checkpoints; if everySeconds is set too, whichever is due first counts."
    )
    every_seconds: Count | None = Field(
        None, description="Seconds between checkpoints; default 600 if everySteps is left out too."
    )
    keep: Count = Field(3, description="Number of newest checkpoints to keep.")
    keep_best: KeepBest | None = Field(
        None,
        description="Also keep the checkpoint with the best evaluation; every better one makes a checkpoint. Needs"
        " recipe.evaluateEverySteps or evaluateEveryEpochs.",
    )
    resume_from: StorageUri | None = Field(
        None, description="Another job's folder, or one checkpoint (.../step-...), to begin with if this job has none."
    )
    init_from: InitFrom | None = Field(
        None, description="Weights to begin with at step 0, with a new optimizer, if there is no own checkpoint."
    )


class ProfileRequest(ApiModel):
    steps: Annotated[int, Field(strict=True, ge=1, le=100)] = Field(
        description="Number of steps to capture, after the first three, which compile; every one adds megabytes."
    )


class Report(ApiModel):
    uri: StorageUri | None = Field(
        None,
        description="Directory for history.json, which `tpujob report` reads, and TensorBoard event files. Without it,"
        " a cluster keeps neither.",
    )
    tensor_board: Boolean = Field(False, description="Write TensorBoard event files to uri.")
    gradient_noise_scale: Boolean = Field(
        False, description="Estimate the gradient noise scale, in examples: above it a larger batch saves little."
    )
    profile: ProfileRequest | None = Field(
        None,
        description="Capture a profiler trace of some steps beside the report, in every attempt and rung: XPlane for"
        " TensorBoard, with backend Torch a trace of torch.profiler.",
    )


def _is_set(root: str, field: str) -> str:
    """Returns CEL for whether the field and all its parents are set."""
    parts = field.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: depth + 1])})" for depth in range(len(parts)))


def _is_unchanged(field: str) -> str:
    """Returns CEL for whether a change leaves the field as it is. A plain comparison fails if the field is absent."""
    now, before = _is_set("self", field), _is_set("oldSelf", field)
    return f"({now}) == ({before}) && (!({now}) || self.{field} == oldSelf.{field})"


def _immutable(field: str) -> Rule:
    return Rule(
        cel=_is_unchanged(field),
        message=f"{field} cannot change once the job exists; delete the job and create it again",
        holds=None,
        field=field,
    )


def _is_true(condition: str) -> str:
    exists = f"oldSelf.status.conditions.exists(c, c.type == '{condition}' && c.status == 'True')"
    return f"has(oldSelf.status.conditions) && {exists}"


# Ready means that a suspended job has no worker left. A job without a state has not been seen by an operator. A job
# that a change has made Invalid can be corrected.
_RESTS = (
    "has(oldSelf.spec.runPolicy) && oldSelf.spec.runPolicy.suspend"
    " && (!has(oldSelf.status) || !has(oldSelf.status.state)"
    f" || (oldSelf.status.state == 'Suspended' && {_is_true('Ready')})"
    " || (oldSelf.status.state == 'Invalid' && (!has(oldSelf.status.attempt) || oldSelf.status.attempt == 0"
    f" || ({_is_true('Suspended')}))))"
)


def _mutable_at_rest(field: str) -> Rule:
    return Rule(
        cel=f"({_is_unchanged(f'spec.{field}')}) || ({_RESTS})",
        message=f"{field} can change only while the job is suspended and none of its workers runs: set"
        " runPolicy.suspend and wait until kubectl shows the condition Ready",
        holds=None,
        field=f"spec.{field}",
    )


# Node labels that `slice` and `slice.provisioning` ask for, which would override a nodeSelector.
_SLICE_LABELS = (constants.NODE_LABEL_ACCELERATOR, constants.NODE_LABEL_TOPOLOGY, constants.NODE_LABEL_CHIPS_PER_HOST)
_CAPACITY_LABELS = (
    constants.NODE_LABEL_SPOT,
    constants.NODE_LABEL_FLEX_START,
    constants.NODE_LABEL_QUEUED,
    constants.NODE_LABEL_RESERVATION,
    constants.NODE_LABEL_RESERVATION_PROJECT,
    constants.NODE_LABEL_RESERVATION_AFFINITY,
    constants.NODE_LABEL_RESERVATION_BLOCK,
    constants.NODE_LABEL_RESERVATION_SUBBLOCK,
)


_NO_DOUBLED_LABELS = (
    "self.slice.hardware == 'CPU' || !has(self.trainer.nodeSelector)"
    f" || !self.trainer.nodeSelector.exists(key, key in {cel_list(_SLICE_LABELS)}"
    f" || (has(self.slice.provisioning) && key in {cel_list(_CAPACITY_LABELS)}))"
)
_DOUBLED_LABELS = "slice and slice.provisioning choose the TPU nodes; leave their labels out of nodeSelector"


def _doubled_labels(spec: "Spec") -> list[str]:
    if spec.slice.hardware is Hardware.CPU:
        return []
    labels = (*_SLICE_LABELS, *(_CAPACITY_LABELS if spec.slice.provisioning else ()))
    return [key for key in spec.trainer.node_selector or {} if key in labels]


IMMUTABLE = (
    *(f"slice.{to_camel(name)}" for name in Slice.model_fields if name != "provisioning"),
    "ladder",
    "placement.alternatives",
    "placement.count",
    "placement.batch",
    *(f"trainer.{name}" for name in ("entrypoint", "command", "args", "code", "backend", "torch")),
    "recipe",
    "checkpoint.uri",
    "checkpoint.resumeFrom",
    "checkpoint.initFrom",
    "managedBy",
)
"""What a job is: its slices, its program, its recipe, and where its weights are."""

MUTABLE_AT_REST = (
    "slice.provisioning",
    "placement.returnToPreferred",
    "trainer",
    "data",
    "checkpoint",
    "report",
    "runPolicy.restart",
)
"""What may change while the job is suspended, except for what is IMMUTABLE. The next attempt has the new values."""


_ACCELERATORS = ("nvidia.com/gpu", "amd.com/gpu", TPU_RESOURCE)

_LAUNCHERS = ("torchrun", "accelerate")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_CEL_WORDS = "(self.trainer.command + (has(self.trainer.args) ? self.trainer.args : []))"
_CEL_IS_LAUNCHER = (
    f"(self.trainer.command[0].matches('^(.*/)?({'|'.join(_LAUNCHERS)})$') || {_CEL_WORDS}.size() > 2"
    f" && {_CEL_WORDS}[1] == '-m' && {_CEL_WORDS}[2] in {list(_LAUNCHER_MODULES)})"
)


def is_gpu_launcher(words: Sequence[str]) -> bool:
    """Returns whether a command starts a launcher that joins processes by torch.distributed and knows nothing of
    chips."""
    module = words[2] if len(words) > 2 and words[1] == "-m" else ""
    return words[0].rpartition("/")[2] in _LAUNCHERS or module in _LAUNCHER_MODULES


class Spec(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.trainer.backend != 'Torch' || (self.slice.hardware == 'TPU')"
            " == (has(self.trainer.torch) && self.trainer.torch.device == 'tpu')",
            message="backend Torch needs torch.device tpu on hardware TPU, and another device on CPU; for a script"
            " of torchrun's, leave backend at XLA and start it with python: torch_xla.launch takes torchrun's place",
            holds=lambda spec: (
                spec.trainer.backend is not BackendName.TORCH
                or (spec.slice.hardware is Hardware.TPU)
                == (spec.trainer.torch is not None and spec.trainer.torch.device == "tpu")
            ),
            field="trainer",
            at_creation=True,
        ),
        Rule(
            cel="self.slice.hardware != 'TPU' || self.trainer.backend == 'Torch' || !has(self.trainer.command)"
            f" || !{_CEL_IS_LAUNCHER}",
            message="torchrun and accelerate join no processes on TPU chips: each host would train a model of its own"
            " on its CPU; start the script with python and call torch_xla.launch in it, or give trainer.entrypoint",
            holds=lambda spec: (
                spec.slice.hardware is not Hardware.TPU
                or spec.trainer.backend is BackendName.TORCH
                or spec.trainer.command is None
                or not is_gpu_launcher([*spec.trainer.command, *(spec.trainer.args or ())])
            ),
            field="trainer.command",
            at_creation=True,
        ),
        Rule(
            cel="self.slice.hardware != 'TPU' || !has(self.trainer.resources)"
            f" || !({cel_asks_for(_ACCELERATORS, 'self.trainer.resources')})",
            message=f"nodes with TPUs have no GPUs, and the slice says how many {TPU_RESOURCE} a worker has; leave them"
            " out",
            holds=lambda spec: (
                spec.slice.hardware is not Hardware.TPU or amounts_of(spec.trainer.resources).isdisjoint(_ACCELERATORS)
            ),
            field="trainer.resources",
            at_creation=True,
            is_mutable=True,
        ),
        Rule(
            cel="!has(self.trainer.entrypoint) || self.slice.hardware != 'TPU' || self.slice.count == 1"
            " || self.trainer.backend == 'XLASPMD'",
            message="several slices need backend XLASPMD, which runs one process per host: slices meet at one port of"
            " each host (MEGASCALE_PORT), and the other backends run a process per chip",
            holds=lambda spec: (
                spec.trainer.entrypoint is None
                or spec.slice.hardware is not Hardware.TPU
                or spec.slice.count == 1
                or spec.trainer.backend is BackendName.XLA_SPMD
            ),
            field="trainer.backend",
            at_creation=True,
        ),
        Rule(
            cel="has(self.trainer.entrypoint) || self.slice.hardware != 'TPU' || self.slice.count == 1"
            " || self.trainer.backend != 'Torch'",
            message="TorchTPU is not known to join slices; your own command on several slices needs torch_xla: leave"
            " backend at XLA",
            holds=lambda spec: (
                spec.trainer.entrypoint is not None
                or spec.slice.hardware is not Hardware.TPU
                or spec.slice.count == 1
                or spec.trainer.backend is not BackendName.TORCH
            ),
            field="trainer.backend",
            at_creation=True,
        ),
        Rule(
            cel="self.trainer.backend != 'Torch' || self.slice.hardware != 'TPU'"
            f" || !{cel_generation_is(WITHOUT_TORCH_TPU, 'self.slice')}",
            message="TorchTPU runs on v4 and newer; for v2 and v3, leave backend at XLA",
            holds=lambda spec: (
                spec.trainer.backend is not BackendName.TORCH
                or spec.slice.hardware is not Hardware.TPU
                or not is_generation(spec.slice, WITHOUT_TORCH_TPU)
            ),
            field="trainer.backend",
            at_creation=True,
        ),
        Rule(
            cel="self.recipe.sharding == 'Replicated' || self.trainer.backend != 'XLASPMD'",
            message="sharding Optimizer needs a process per replica, and backend XLASPMD runs one per host; use backend"
            " XLA or Torch",
            holds=lambda spec: (
                spec.recipe.sharding is Sharding.REPLICATED or spec.trainer.backend is not BackendName.XLA_SPMD
            ),
            field="recipe.sharding",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.recipe.scaling) || self.recipe.scaling.learningRate != 'AdaScale'"
            " || (has(self.trainer.entrypoint) && self.trainer.loop == 'BuiltIn')",
            message="scaling.learningRate AdaScale needs trainer.entrypoint and loop BuiltIn: the trainer's own loop"
            " measures the gradients of the replicas",
            holds=lambda spec: (
                spec.recipe.scaling.learning_rate is not LearningRateScaling.ADA_SCALE
                or (spec.trainer.entrypoint is not None and spec.trainer.loop is Loop.BUILT_IN)
            ),
            field="recipe.scaling.learningRate",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.report) || has(self.trainer.entrypoint)",
            message="report needs trainer.entrypoint; your own loop writes its own reports",
            holds=lambda spec: spec.report is None or spec.trainer.entrypoint is not None,
            field="report",
            at_creation=True,
            is_mutable=True,
        ),
        Rule(
            cel="!has(self.entryCheck)"
            " || (self.entryCheck.mode != 'Require' && self.entryCheck.dataInRegion != 'Require'"
            " && self.entryCheck.compile != 'Require')"
            " || has(self.trainer.entrypoint)",
            message="entryCheck.mode, dataInRegion and compile Require need trainer.entrypoint: your own command"
            " may not stop after two steps",
            holds=lambda spec: spec.trainer.entrypoint is not None or not spec.entry_check.is_required,
            field="entryCheck.mode",
            at_creation=True,
            is_mutable=True,
        ),
        Rule(
            cel="!has(self.entryCheck) || self.entryCheck.compile != 'Require'"
            " || (self.trainer.backend == 'XLA' && self.trainer.loop == 'BuiltIn')",
            message="entryCheck.compile Require needs backend XLA and loop BuiltIn; other steps are not compiled",
            holds=lambda spec: (
                spec.entry_check.compile is not CompileCheck.REQUIRE
                or (spec.trainer.backend is BackendName.XLA and spec.trainer.loop is Loop.BUILT_IN)
            ),
            field="entryCheck.compile",
            at_creation=True,
            is_mutable=True,
        ),
        Rule(
            cel=_NO_DOUBLED_LABELS,
            message=_DOUBLED_LABELS,
            holds=lambda spec: not _doubled_labels(spec),
            field="trainer.nodeSelector",
            explain=lambda spec: (
                f"slice and slice.provisioning set these; leave them out: {', '.join(_doubled_labels(spec))}"
            ),
            at_creation=True,
        ),
        # In place of `is_mutable`, whose rule would cost the API server too much here.
        Rule(
            cel=f"(({_is_unchanged('trainer.nodeSelector')}) && ({_is_unchanged('slice.provisioning')}))"
            f" || {_NO_DOUBLED_LABELS}",
            message=_DOUBLED_LABELS,
            holds=None,
            field="trainer.nodeSelector",
        ),
        Rule(
            cel="!has(self.checkpoint) || !has(self.checkpoint.keepBest) || has(self.recipe.evaluateEverySteps)"
            " || has(self.recipe.evaluateEveryEpochs)",
            message="checkpoint.keepBest needs recipe.evaluateEverySteps (or evaluateEveryEpochs): without it there is"
            " one evaluation, at the end",
            holds=lambda spec: spec.checkpoint is None or spec.checkpoint.keep_best is None or spec.recipe.evaluates,
            field="checkpoint.keepBest",
            at_creation=True,
            is_mutable=True,
        ),
        Rule(
            cel="!has(self.ladder) || has(self.trainer.entrypoint)",
            message="a ladder needs trainer.entrypoint: the gates judge what the trainer measures, and your own loop"
            " decides when it ends",
            holds=lambda spec: spec.ladder is None or spec.trainer.entrypoint is not None,
            field="ladder",
            at_creation=True,
        ),
        Rule(
            cel=f"!has(self.ladder) || [{cel_chips('self.slice')}].all(chips, chips == 0 ||"
            f" self.ladder.rungs.all(rung, {cel_chips('rung.slice')} <= chips))",
            message="no rung may have more chips than spec.slice, which is the top rung",
            holds=lambda spec: (
                spec.ladder is None
                or not requested_chips(spec.slice)
                or all(requested_chips(rung.slice) <= requested_chips(spec.slice) for rung in spec.ladder.rungs)
            ),
            field="ladder.rungs",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.ladder) || self.ladder.rungs.all(rung, rung.slice.hardware == self.slice.hardware)",
            message="rungs must have the hardware of spec.slice: either all are TPU or all are CPU",
            holds=lambda spec: (
                spec.ladder is None or all(rung.slice.hardware is spec.slice.hardware for rung in spec.ladder.rungs)
            ),
            field="ladder.rungs",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.ladder) || self.ladder.from != 'Checkpoint'"
            " || (has(self.checkpoint) && !has(self.checkpoint.resumeFrom))",
            message="ladder.from Checkpoint needs spec.checkpoint without resumeFrom: both say where the job begins",
            holds=lambda spec: (
                spec.ladder is None
                or spec.ladder.begin is not Begin.CHECKPOINT
                or (spec.checkpoint is not None and spec.checkpoint.resume_from is None)
            ),
            field="ladder.from",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.placement) || !has(self.placement.alternatives)"
            " || self.placement.alternatives.all(other, other.slice.hardware == self.slice.hardware)",
            message="alternatives must have the hardware of spec.slice: either all are TPU or all are CPU",
            holds=lambda spec: (
                spec.placement is None
                or all(other.slice.hardware is spec.slice.hardware for other in spec.placement.alternatives or ())
            ),
            field="placement.alternatives",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.placement) || !has(self.placement.count) || self.placement.count.min < self.slice.count",
            message="placement.count.min must be below spec.slice.count, the most slices that the job runs on",
            holds=lambda spec: (
                spec.placement is None or spec.placement.count is None or spec.placement.count.min < spec.slice.count
            ),
            field="placement.count",
            at_creation=True,
        ),
        Rule(
            cel="!has(self.placement) || self.placement.returnToPreferred == 'Never' || has(self.checkpoint)",
            message="placement.returnToPreferred needs spec.checkpoint: without it, the job restarts at step 0 after"
            " every move",
            holds=lambda spec: (
                spec.placement is None
                or spec.placement.return_to_preferred is ReturnToPreferred.NEVER
                or spec.checkpoint is not None
            ),
            field="placement.returnToPreferred",
            at_creation=True,
            is_mutable=True,
        ),
        *(_immutable(field) for field in IMMUTABLE),
    )

    slice: Slice = Field(description="The TPU slice, or slices, that the job runs on.")
    ladder: Ladder | None = Field(
        None, description="Short trainings on smaller slices, which must pass before spec.slice is used."
    )
    placement: PlacementPolicy | None = Field(
        None, description="Other slices that the job may run on; if left out, it waits for spec.slice."
    )
    trainer: Trainer = Field(description="What runs in every worker: the container and the pod around it.")
    recipe: Recipe = Field(
        description="Hyperparameters as tuned on tunedOn; status.resolved shows them scaled to the job's slice."
    )
    data: Data | None = Field(None, description="Where the training data is.")
    checkpoint: Checkpoint | None = Field(
        None, description="Where and how often to save checkpoints. If left out, every restart begins at step 0."
    )
    report: Report | None = Field(None, description="What the trainer reports besides the job's status.")
    entry_check: EntryCheck = Field(
        default_factory=EntryCheck, description="What is tried on a CPU before the job asks for its slice."
    )
    run_policy: RunPolicy = Field(
        default_factory=RunPolicy, description="Suspension, deadlines, restarts and clean-up of the job."
    )
    managed_by: ControllerName | None = Field(
        None,
        description="Controller that runs the job: kueue.x-k8s.io/multikueue for a job that Kueue sends to another"
        f" cluster, or by default this operator, {constants.MANAGED_BY_US}. It ignores jobs with any other name here.",
    )


_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME_MESSAGE = (
    f"metadata.name must be at most {MAX_JOB_NAME_LENGTH} characters of a-z, 0-9 and '-', beginning"
    " with a letter: it becomes the Service's name and part of every worker's name"
)


def _explain_name(job: "TPUTrainingJob") -> str:
    if not job.name:
        return _NO_NAME
    near = re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")
    near = (f"job-{near}" if near[:1].isdigit() else near)[:MAX_JOB_NAME_LENGTH].strip("-")
    return _NAME_MESSAGE + (f"; write {near}" if _NAME.fullmatch(near) else "")


_NO_NAME = "metadata.name is required; only kubectl create replaces generateName"


# TPU_WORKER_HOSTNAMES has "<attempt>-<host>.<job>," for every host of a slice, with at most 5 and 4 digits.
_BESIDE_THE_NAME = len("99999-4999.,")


def _host_names_fit(job: "TPUTrainingJob") -> bool:
    hosts = requested_hosts_per_slice(job.spec.slice)
    # No shorter name helps a slice that has too many hosts for any job, which another rule refuses.
    return hosts > MAX_HOSTS or hosts * (len(job.name) + _BESIDE_THE_NAME) <= MAX_HOST_NAMES_LENGTH


def _explain_host_names(job: "TPUTrainingJob") -> str:
    hosts = requested_hosts_per_slice(job.spec.slice)
    return (
        f"metadata.name has {len(job.name)} characters; with {hosts} hosts in a slice at most"
        f" {MAX_HOST_NAMES_LENGTH // hosts - _BESIDE_THE_NAME} fit: one environment variable (TPU_WORKER_HOSTNAMES)"
        " holds the names of all hosts, and Linux allows 128 KiB"
    )


class TPUTrainingJob(ApiModel):
    """One training job. `metadata` and `status` are as the API server returns them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {MAX_JOB_NAME_LENGTH}"
            " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            message=_NAME_MESSAGE,
            explain=_explain_name,
            holds=lambda job: len(job.name) <= MAX_JOB_NAME_LENGTH and _NAME.fullmatch(job.name) is not None,
            at_creation=True,
        ),
        Rule(
            cel=f"[{cel_hosts_per_slice('self.spec.slice')}].all(hosts, hosts > {MAX_HOSTS}"
            f" || hosts * (self.metadata.name.size() + {_BESIDE_THE_NAME}) <= {MAX_HOST_NAMES_LENGTH})",
            message="metadata.name is too long for a slice of so many hosts; shorten it: one environment variable"
            " (TPU_WORKER_HOSTNAMES) holds the names of all hosts, and Linux allows 128 KiB",
            holds=_host_names_fit,
            explain=_explain_host_names,
            at_creation=True,
        ),
        *(_mutable_at_rest(field) for field in MUTABLE_AT_REST),
    )

    api_version: Literal["tpu-operator.dev/v1alpha1"]
    kind: Literal["TPUTrainingJob"]
    metadata: Mapping[str, Any]
    spec: Spec
    status: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "default")

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))

    @property
    def generation(self) -> int:
        return int(self.metadata.get("generation", 1))
