"""The TPUTrainingJob itself: metadata, spec, and the rules over the whole object."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tpu_training_operator.api import constants
from tpu_training_operator.api.constants import MAX_HOST_NAMES_LENGTH, MAX_JOB_NAME_LENGTH
from tpu_training_operator.api.model import ApiModel, Rule
from tpu_training_operator.api.output import Checkpoint, Report
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.api.slice import Hardware, Slice, cel_hosts_per_slice, hosts_per_slice_asked
from tpu_training_operator.api.slice_ref import cel_list
from tpu_training_operator.api.trainer import Backend, Trainer


class Data(ApiModel):
    uri: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Where the training data is; handed to the task and as TPUJOB_DATA_URI."
    )


def _immutable(field: str, *, optional: bool = False) -> Rule:
    same = f"self.{field} == oldSelf.{field}"
    # A plain comparison would let an optional field be added or removed unseen.
    now, before = _given("self", field), _given("oldSelf", field)
    return Rule(
        cel=f"({now}) == ({before}) && (!({now}) || {same})" if optional else same,
        message=f"{field} cannot change once the job exists; delete the job and create it anew",
        holds=None,
        field=field,
    )


# Node labels that `slice` and `slice.provisioning` ask for: a nodeSelector with another value would be overridden.
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


def _doubled_labels(spec: "Spec") -> list[str]:
    if spec.slice.hardware is Hardware.CPU:
        return []
    ours = (*_SLICE_LABELS, *(_CAPACITY_LABELS if spec.slice.provisioning else ()))
    return [key for key in spec.trainer.node_selector or {} if key in ours]


def _given(root: str, field: str) -> str:
    """CEL: whether the field is there, and what it is in."""
    parts = field.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: depth + 1])})" for depth in range(len(parts)))


class Spec(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.trainer.backend != 'Torch' || (self.slice.hardware == 'TPU')"
            " == (has(self.trainer.torch) && self.trainer.torch.device == 'tpu')",
            message="backend Torch runs on hardware TPU with torch.device tpu only, and on CPU with any other; the"
            " usual backend on TPU is XLA",
            holds=lambda spec: (
                spec.trainer.backend is not Backend.TORCH
                or (spec.slice.hardware is Hardware.TPU)
                == (spec.trainer.torch is not None and spec.trainer.torch.device == "tpu")
            ),
            field="trainer",
        ),
        Rule(
            cel="!has(self.report) || has(self.trainer.entrypoint)",
            message="report goes with trainer.entrypoint; a loop of your own writes what it likes where it likes",
            holds=lambda spec: spec.report is None or spec.trainer.entrypoint is not None,
            field="report",
        ),
        Rule(
            cel="self.slice.hardware == 'CPU' || !has(self.trainer.nodeSelector)"
            f" || !self.trainer.nodeSelector.exists(key, key in {cel_list(_SLICE_LABELS)}"
            f" || (has(self.slice.provisioning) && key in {cel_list(_CAPACITY_LABELS)}))",
            message="slice and slice.provisioning say which TPU nodes to take; leave their labels out of nodeSelector",
            holds=lambda spec: not _doubled_labels(spec),
            field="trainer.nodeSelector",
            explain=lambda spec: f"set by slice and slice.provisioning, leave out: {', '.join(_doubled_labels(spec))}",
        ),
        _immutable("slice"),
        _immutable("trainer"),
        _immutable("recipe"),
        _immutable("data", optional=True),
        _immutable("checkpoint", optional=True),
        _immutable("report", optional=True),
        _immutable("runPolicy.restart", optional=True),
    )

    slice: Slice
    trainer: Trainer
    recipe: Recipe
    data: Data | None = None
    checkpoint: Checkpoint | None = None
    report: Report | None = None
    run_policy: RunPolicy = Field(default_factory=RunPolicy)


_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def _name_fits(job: "TPUTrainingJob") -> bool:
    return len(job.name) <= MAX_JOB_NAME_LENGTH and _NAME.fullmatch(job.name) is not None


# TPU_WORKER_HOSTNAMES has "<attempt>-<host>.<job>," for every host of a slice: 5 and 4 digits at most.
_BESIDE_THE_NAME = len("99999-4999.,")


def _host_names_fit(job: "TPUTrainingJob") -> bool:
    return hosts_per_slice_asked(job.spec.slice) * (len(job.name) + _BESIDE_THE_NAME) <= MAX_HOST_NAMES_LENGTH


def _explain_host_names(job: "TPUTrainingJob") -> str:
    hosts = hosts_per_slice_asked(job.spec.slice)
    return (
        f"metadata.name has {len(job.name)} characters; with {hosts} hosts in a slice, at most"
        f" {MAX_HOST_NAMES_LENGTH // hosts - _BESIDE_THE_NAME} fit: the names of all hosts are one environment variable"
        " (TPU_WORKER_HOSTNAMES), and Linux allows 128 KiB"
    )


class TPUTrainingJob(ApiModel):
    """One training job. `metadata` and `status` are kept as they came."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {MAX_JOB_NAME_LENGTH}"
            " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            message=f"metadata.name must be at most {MAX_JOB_NAME_LENGTH} characters of a-z, 0-9 and '-', beginning"
            " with a letter: it becomes the name of the Service and part of every worker's",
            holds=_name_fits,
        ),
        Rule(
            cel=f"{cel_hosts_per_slice('self.spec.slice')} * (self.metadata.name.size() + {_BESIDE_THE_NAME})"
            f" <= {MAX_HOST_NAMES_LENGTH}",
            message="metadata.name is too long for a slice of so many hosts: the names of all hosts are one environment"
            " variable (TPU_WORKER_HOSTNAMES), and Linux allows 128 KiB; shorten the name",
            holds=_host_names_fit,
            explain=_explain_host_names,
        ),
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
        return str(self.metadata.get("namespace", "default"))

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))

    @property
    def generation(self) -> int:
        return int(self.metadata.get("generation", 1))
