"""`spec.entryCheck`: what is tried on a CPU before a job asks for its slice."""

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Count, Rule
from tpu_training_operator.api.trainer import Resources


class EntryCheckMode(StrEnum):
    """Auto: jobs on TPUs are checked, and only the user's own errors fail them. Require: any job must pass."""

    AUTO = "Auto"
    REQUIRE = "Require"
    SKIP = "Skip"


class DataInRegion(StrEnum):
    """What to do if a bucket is not near the slice."""

    WARN = "Warn"
    REQUIRE = "Require"
    IGNORE = "Ignore"


class CompileCheck(StrEnum):
    """Auto: the step is compiled if the image can do it. Require: the job does not start without a verdict."""

    AUTO = "Auto"
    REQUIRE = "Require"
    SKIP = "Skip"


class EntryCheck(ApiModel):
    """The settings may change until the first attempt, so that a user can switch off a check that holds up the job."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.dataInRegion != 'Require' || self.mode != 'Skip'",
            message="dataInRegion Require needs the entry check, which asks where the buckets are; leave out mode Skip",
            holds=lambda check: (
                check.data_in_region is not DataInRegion.REQUIRE or check.mode is not EntryCheckMode.SKIP
            ),
            field="dataInRegion",
        ),
        Rule(
            cel="self.compile != 'Require' || self.mode != 'Skip'",
            message="compile Require needs the entry check, whose pod compiles the step; leave out mode Skip",
            holds=lambda check: check.compile is not CompileCheck.REQUIRE or check.mode is not EntryCheckMode.SKIP,
            field="compile",
        ),
    )

    mode: EntryCheckMode = Field(
        EntryCheckMode.AUTO,
        description="Whether a pod without TPUs makes two steps before any worker is created. Auto: on hardware TPU;"
        " your own errors fail the job, anything else is a warning. Require: on any hardware, and it must pass. Skip:"
        " never.",
    )
    compile: CompileCheck = Field(
        CompileCheck.AUTO,
        description="Whether that pod compiles the step for the slice; one that does not fit into a core's memory fails"
        " the job. Auto: on hardware TPU with backend XLA, if the image has jax and libtpu, for at most five minutes;"
        " no verdict is a warning. Require: on any hardware; without a verdict the job fails. Skip: never.",
    )
    data_in_region: DataInRegion = Field(
        DataInRegion.WARN,
        description="When a bucket of the job (data, checkpoint, report) is not in the slice's region. Warn: show it in"
        " the condition DataInRegion. Require: fail the job, also if the region is unknown, and check on any hardware."
        " Ignore: do nothing.",
    )
    resources: Resources | None = Field(
        None,
        description="Resources of the check's pod. By default it requests half a CPU and 2Gi of memory (2 CPUs and 8Gi"
        " with compile Require), and is limited to 16Gi.",
    )
    deadline_seconds: Count = Field(
        900,
        description="Seconds that the check's pod may take on its node, pull and compilation included. It waits for a"
        " node as long, but at most five minutes.",
    )

    @property
    def is_required(self) -> bool:
        """Whether the job may begin only once the check has finished."""
        needs = (self.mode is EntryCheckMode.REQUIRE, self.data_in_region is DataInRegion.REQUIRE)
        return any(needs) or self.compile is CompileCheck.REQUIRE
