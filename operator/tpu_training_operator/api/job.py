"""The TPUTrainingJob itself: metadata, spec, and the rules over the whole object."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tpu_training_operator.api.constants import MAX_JOB_NAME_LENGTH
from tpu_training_operator.api.model import ApiModel, Rule
from tpu_training_operator.api.output import Checkpoint, Report
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.run_policy import RunPolicy
from tpu_training_operator.api.slice import Hardware, Slice
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


class TPUTrainingJob(ApiModel):
    """One training job. `metadata` and `status` are kept as they came."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {MAX_JOB_NAME_LENGTH}"
            " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            message=f"metadata.name must be at most {MAX_JOB_NAME_LENGTH} characters of a-z, 0-9 and '-', beginning"
            " with a letter: it becomes the Service name and part of every worker's host name",
            holds=_name_fits,
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
