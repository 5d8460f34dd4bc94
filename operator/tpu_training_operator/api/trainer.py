"""`spec.trainer`: what runs in every worker. A closed set of pod fields, not an embedded pod template: it keeps
the CRD small, and a TPUTrainingJob can never ask for host paths, the host's processes or privilege.
"""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_training_operator.api.constants import ENV_PREFIX, RESERVED_ENV
from tpu_training_operator.api.model import (
    ENTRYPOINT_PATTERN,
    ApiModel,
    Boolean,
    CountOrZero,
    DnsLabel,
    LongText,
    Passthrough,
    Rule,
    SharedMemory,
    ShortText,
)
from tpu_training_operator.api.security_context import SecurityContext

_DeviceName = Annotated[str, Field(max_length=32, pattern=r"^[a-z][a-z0-9_]*$")]


class Backend(StrEnum):
    XLA = "XLA"
    XLA_SPMD = "XLASPMD"
    TORCH = "Torch"


class TorchRuntime(ApiModel):
    """What backend Torch runs on: cpu and gloo, cuda and nccl, or TorchTPU's tpu and tpu_dist."""

    device: _DeviceName = "cpu"
    collectives: _DeviceName = Field("gloo", description="Backend of torch.distributed for that device.")
    processes_per_host: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        1, description="The replicas of a host are shared out evenly to them."
    )


class EnvVar(ApiModel):
    name: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: LongText | None = None
    value_from: Passthrough | None = None


class EnvFromSource(ApiModel):
    prefix: ShortText | None = None
    config_map_ref: Passthrough | None = None
    secret_ref: Passthrough | None = None


_Quantity = Annotated[Annotated[int, Field(strict=True)] | str, Field(union_mode="left_to_right")]
Quantities = Annotated[dict[str, _Quantity], Field(max_length=16)]


class Resources(ApiModel):
    """Compute resources of the worker container; google.com/tpu is added by the operator."""

    requests: Quantities | None = None
    limits: Quantities | None = None


class Toleration(ApiModel):
    key: ShortText | None = None
    operator: Annotated[str, Field(max_length=16)] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Annotated[str, Field(max_length=32)] | None = None
    toleration_seconds: CountOrZero | None = None


class VolumeMount(ApiModel):
    name: DnsLabel
    mount_path: Annotated[str, Field(min_length=1, max_length=1024)]
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    read_only: Boolean | None = None


_VOLUME_SOURCES = (
    "emptyDir",
    "configMap",
    "secret",
    "persistentVolumeClaim",
    "projected",
    "csi",
    "ephemeral",
)


class Volume(ApiModel):
    """A volume of one of the kinds that need no trust in the node (no hostPath)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"[{', '.join(f'has(self.{source})' for source in _VOLUME_SOURCES)}].exists_one(given, given)",
            message=f"give exactly one of {', '.join(_VOLUME_SOURCES)}",
            holds=lambda volume: len(volume.model_fields_set - {"name"}) == 1,
        ),
    )

    name: DnsLabel
    empty_dir: Passthrough | None = None
    config_map: Passthrough | None = None
    secret: Passthrough | None = None
    persistent_volume_claim: Passthrough | None = None
    projected: Passthrough | None = None
    csi: Passthrough | None = None
    ephemeral: Passthrough | None = None


class LocalObjectReference(ApiModel):
    name: ShortText


# Where processes of one container share memory, such as the batches of PyTorch's loader processes.
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path inside the container


def mounts_shared_memory(trainer: "Trainer") -> bool:
    """Whether a volume of the user's own is there."""
    return any(mount.mount_path.rstrip("/") == SHARED_MEMORY for mount in trainer.volume_mounts or ())


def _reserved(name: str) -> bool:
    return name.startswith(ENV_PREFIX) or name in RESERVED_ENV


_RESERVED_LIST = "[" + ", ".join(f"'{name}'" for name in RESERVED_ENV) + "]"

StringMap = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]


class Trainer(ApiModel):
    """The worker container and the pod around it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.entrypoint) != has(self.command)",
            message="give either entrypoint (module:callable, run by the trainer) or command (your own loop)",
            holds=lambda trainer: (trainer.entrypoint is None) != (trainer.command is None),
        ),
        Rule(
            cel="!has(self.args) || has(self.command)",
            message="args go with command; an entrypoint takes its settings from recipe.parameters",
            holds=lambda trainer: trainer.args is None or trainer.command is not None,
            field="args",
        ),
        Rule(
            cel="!has(self.torch) || self.backend == 'Torch'",
            message="torch goes with backend: Torch only",
            holds=lambda trainer: trainer.torch is None or trainer.backend is Backend.TORCH,
            field="torch",
        ),
        Rule(
            cel=f"!has(self.env) || self.env.all(e, !e.name.startsWith('{ENV_PREFIX}')"
            f" && !(e.name in {_RESERVED_LIST}))",
            message=f"{ENV_PREFIX}* and {', '.join(RESERVED_ENV)} are set by the operator, torch_xla or libtpu",
            holds=lambda trainer: not any(_reserved(variable.name) for variable in trainer.env or ()),
            field="env",
            explain=lambda trainer: (
                "reserved for the operator, torch_xla or libtpu: "
                + ", ".join(variable.name for variable in trainer.env if _reserved(variable.name))
            ),
        ),
        Rule(
            cel="!has(self.sharedMemory) || !has(self.volumeMounts)"
            f" || !self.volumeMounts.exists(m, m.mountPath.matches('^{SHARED_MEMORY}/*$'))",
            message=f"the volume that you mount at {SHARED_MEMORY} has a size of its own; leave sharedMemory out",
            holds=lambda trainer: trainer.shared_memory is None or not mounts_shared_memory(trainer),
            field="sharedMemory",
        ),
    )

    image: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Worker image; local mode does not use it."
    )
    image_pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] | None = None
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16)] | None = None
    entrypoint: Annotated[str, Field(max_length=512, pattern=ENTRYPOINT_PATTERN)] | None = Field(
        None, description="module:callable that returns the Task to train."
    )
    backend: Backend = Field(
        Backend.XLA,
        description="XLA (torch_xla, one process per chip), XLASPMD (torch_xla, one process per host, the batch"
        " shared out by the compiler), or Torch (torch.distributed).",
    )
    torch: TorchRuntime | None = Field(None, description="What backend Torch runs on; left out, cpu and gloo.")
    command: Annotated[list[LongText], Field(min_length=1, max_length=64)] | None = None
    args: Annotated[list[LongText], Field(max_length=256)] | None = None
    env: (
        Annotated[
            list[EnvVar],
            Field(
                max_length=128,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = None
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] | None = None
    resources: Resources | None = Field(
        None,
        description="What is left out of cpu and memory is requested by the machine type, three quarters of it; there"
        " are no limits by default.",
    )
    shared_memory: SharedMemory | None = Field(
        None,
        description=f"Size of {SHARED_MEMORY}, which counts as memory of the container: 512Mi, 16Gi. Left out, it may"
        " grow to the container's memory limit, or to the node's memory.",
    )
    volumes: Annotated[list[Volume], Field(max_length=32)] | None = None
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32)] | None = None
    service_account_name: ShortText | None = None
    security_context: SecurityContext | None = Field(
        None, description="User, groups and capabilities. Left out: the image's user, not root, without capabilities."
    )
    host_network: Boolean = Field(
        False,
        description="Run on the nodes' own network: more bandwidth between slices, but neither Workload Identity nor"
        " network policies, and no namespace of Pod Security level baseline or restricted allows it.",
    )
    node_selector: StringMap | None = None
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = None
    priority_class_name: ShortText | None = None
    pod_labels: StringMap | None = None
    pod_annotations: StringMap | None = None
    termination_grace_period_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = Field(
        30, description="Time between SIGTERM and SIGKILL; 3600 s is the most that GKE maintenance grants."
    )
