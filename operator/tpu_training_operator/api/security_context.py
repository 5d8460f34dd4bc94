"""`spec.trainer.securityContext`: which user the worker runs as, and the few capabilities that a TPU may need.

A closed set: neither privilege nor the host's processes can be asked for. What a namespace allows of it is for its Pod
Security level to say.
"""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Rule

_Id = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]


class Capability(StrEnum):
    DAC_OVERRIDE = "DAC_OVERRIDE"
    """To read and write files whatever their owner."""
    IPC_LOCK = "IPC_LOCK"
    """To lock memory beyond the limit, as libtpu does for transfers."""
    SYS_PTRACE = "SYS_PTRACE"
    """To look into other processes of the worker, as profilers do."""
    SYS_RESOURCE = "SYS_RESOURCE"
    """To raise limits, such as that of locked memory (ulimit -l)."""


class Capabilities(ApiModel):
    """All others are dropped."""

    add: Annotated[list[Capability], Field(min_length=1, max_length=4)] = Field(
        description="Pod Security levels restricted and baseline allow none of IPC_LOCK, SYS_PTRACE and SYS_RESOURCE."
    )


class SecurityContext(ApiModel):
    """User and groups of the worker's processes. Left out, the image's user, which must not be root."""

    rules: ClassVar[tuple[Rule, ...]] = (
        # To any other user Linux gives capabilities by files only, which no-new-privileges rules out.
        Rule(
            cel="!has(self.capabilities) || (has(self.runAsUser) && self.runAsUser == 0)",
            message="added capabilities act for root only: set runAsUser: 0, or leave them out",
            holds=lambda context: context.capabilities is None or context.run_as_user == 0,
            field="capabilities",
        ),
    )

    run_as_user: _Id | None = Field(
        None, description="User id; 0 is root, which a namespace of Pod Security level restricted refuses."
    )
    run_as_group: _Id | None = Field(None, description="Primary group id.")
    fs_group: _Id | None = Field(
        None, description="Group that may write to the volumes; for filesystems whose root belongs to root."
    )
    supplemental_groups: Annotated[list[_Id], Field(max_length=16)] | None = Field(
        None, description="Further groups, such as that of a shared filesystem."
    )
    capabilities: Capabilities | None = Field(None, description="Goes with runAsUser: 0.")
