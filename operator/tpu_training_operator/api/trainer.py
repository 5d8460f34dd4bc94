"""`spec.trainer`: what runs in every worker.

A closed set of pod fields instead of an embedded pod template: it keeps the CRD small, and a TPUTrainingJob can never
ask for host paths, the host's processes or privilege.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_contract.run_spec import Execution, Loop
from tpu_training_operator.api.constants import CODE_ARCHIVE_KEY, ENV_PREFIX, OWN_PREFIX, RESERVED_ENV
from tpu_training_operator.api.model import (
    CODE_SCHEME,
    ENTRYPOINT_PATTERN,
    IMAGE_PATTERN,
    ApiModel,
    Boolean,
    CodeUri,
    CountOrZero,
    DnsLabel,
    LongText,
    Passthrough,
    Quantity,
    Rule,
    Sha256,
    ShortText,
    StorageUri,
    map_by,
    unique_by,
)

_DeviceName = Annotated[str, Field(max_length=32, pattern=r"^[a-z][a-z0-9_]*$")]


class BackendName(StrEnum):
    XLA = "XLA"
    XLA_SPMD = "XLASPMD"
    TORCH = "Torch"


class TorchRuntime(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.execution) || self.execution != 'Fuse' || self.device == 'tpu'",
            message="Fuse is a mode of TorchTPU: it needs device: tpu; elsewhere use Compile or Eager",
            holds=lambda torch: torch.execution is not Execution.FUSE or torch.on_tpu,
            field="execution",
        ),
        Rule(
            cel="!has(self.compileCache) || self.device == 'tpu'",
            message="compileCache is only for TorchTPU (device: tpu)",
            holds=lambda torch: torch.compile_cache is None or torch.on_tpu,
            field="compileCache",
        ),
    )

    device: _DeviceName = Field("cpu", description="Type of torch device: cpu, cuda, or tpu with TorchTPU.")
    collectives: _DeviceName = Field(
        "gloo", description="Backend of torch.distributed for the device: gloo, nccl, or TorchTPU's tpu_dist."
    )
    processes_per_host: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        1,
        description="Processes that each host starts; they share its replicas evenly. With device tpu, one for each"
        " device of the host.",
    )
    execution: Execution = Field(
        Execution.EAGER,
        description="How an entrypoint's step runs on the device. Eager: one operation after the other. Compile: by"
        " torch.compile for fixed shapes; on a CPU or GPU it needs a C++ compiler in the image. Fuse: TorchTPU compiles"
        " operations together, only for device tpu.",
    )
    compile_cache: StorageUri | None = Field(
        None,
        description="Where TorchTPU keeps compiled programs for later attempts and jobs: gs://bucket/path, or an"
        " absolute path on a shared volume.",
    )

    @property
    def on_tpu(self) -> bool:
        """Whether this is TorchTPU."""
        return self.device == "tpu"


class Code(ApiModel):
    """A packed folder, so that a change of code needs no new image. `tpujob submit --code` writes both fields."""

    uri: CodeUri = Field(
        description="Where the packed folder is, a .tar.gz: gs://bucket/folder/FILE, an absolute path on a volume that"
        f" every worker mounts, or secret://NAME for the key {CODE_ARCHIVE_KEY} of a Secret of the namespace."
    )
    sha256: Sha256 = Field(
        description="SHA-256 of that file. Workers refuse any other file, and checkpoints record it."
    )

    @property
    def secret(self) -> str | None:
        """The name of the Secret with the packed folder, if a Secret holds it."""
        return self.uri.removeprefix(CODE_SCHEME) if self.uri.startswith(CODE_SCHEME) else None


class EnvVar(ApiModel):
    name: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")] = Field(
        description="Name of the variable."
    )
    value: LongText | None = Field(None, description="The variable's value; $(NAME) refers to another variable.")
    value_from: Passthrough | None = Field(
        None, description="Source of the value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef or other."
    )


class EnvFromSource(ApiModel):
    prefix: ShortText | None = Field(None, description="Text put before the name of each variable.")
    config_map_ref: Passthrough | None = Field(None, description="ConfigMap whose keys become variables.")
    secret_ref: Passthrough | None = Field(None, description="Secret whose keys become variables.")


Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]


def amounts_of(resources: "Resources | None") -> set[str]:
    """Returns the names of everything that is requested or limited."""
    return set() if resources is None else {*(resources.requests or ()), *(resources.limits or ())}


def cel_asks_for(names: Sequence[str], at: str) -> str:
    """Returns CEL for whether the resources `at` a place that is set have one of the names."""
    return " || ".join(
        f"(has({at}.{part}) && '{name}' in {at}.{part})" for part in ("requests", "limits") for name in names
    )


class Resources(ApiModel):
    requests: Quantities | None = Field(None, description="Amounts that the node must have free, by resource.")
    limits: Quantities | None = Field(None, description="Amounts that the container may not exceed, by resource.")


class Toleration(ApiModel):
    key: ShortText | None = Field(None, description="Key of the tolerated taint; left out, all keys match.")
    operator: Annotated[str, Field(max_length=16)] | None = Field(
        None, description="How key and value match the taint: Equal (default) or Exists."
    )
    value: Annotated[str, Field(max_length=63)] | None = Field(None, description="Value of the tolerated taint.")
    effect: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="NoSchedule, PreferNoSchedule or NoExecute; left out, all effects match."
    )
    toleration_seconds: CountOrZero | None = Field(
        None, description="How long to stay on a node with a NoExecute taint, in seconds; left out, indefinitely."
    )


class VolumeMount(ApiModel):
    name: DnsLabel = Field(description="Name of the volume to mount.")
    mount_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Path in the container where the volume appears."
    )
    sub_path: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Path in the volume to mount; default its top."
    )
    read_only: Boolean | None = Field(None, description="Mount the volume without write access; default false.")


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
    """A volume that gives no access to the node's files, so none of kind hostPath."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"[{', '.join(f'has(self.{source})' for source in _VOLUME_SOURCES)}].exists_one(given, given)",
            message=f"give exactly one of {', '.join(_VOLUME_SOURCES)}",
            holds=lambda volume: len(volume.model_dump(exclude_none=True, exclude={"name"})) == 1,
        ),
    )

    name: DnsLabel = Field(description="Name that volumeMounts refer to.")
    empty_dir: Passthrough | None = Field(None, description="Empty directory that lives as long as the pod.")
    config_map: Passthrough | None = Field(None, description="Files from a ConfigMap.")
    secret: Passthrough | None = Field(None, description="Files from a Secret.")
    persistent_volume_claim: Passthrough | None = Field(
        None, description="Storage of a PersistentVolumeClaim; all workers mount the same claim."
    )
    projected: Passthrough | None = Field(None, description="Files from several sources in one directory.")
    csi: Passthrough | None = Field(
        None, description="Storage from a CSI driver, for example gcsfuse.csi.storage.gke.io."
    )
    ephemeral: Passthrough | None = Field(
        None, description="PersistentVolumeClaim that is created and deleted with each pod."
    )


class LocalObjectReference(ApiModel):
    name: ShortText = Field(description="Name of a Secret in the job's namespace.")


# Processes of one container share memory here, for example the batches of PyTorch's loader processes.
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path inside the container


def mounts_shared_memory(trainer: "Trainer") -> bool:
    """Returns whether the user mounts a volume at SHARED_MEMORY."""
    return any(mount.mount_path.rstrip("/") == SHARED_MEMORY for mount in trainer.volume_mounts or ())


def _is_reserved(name: str) -> bool:
    return name.startswith(ENV_PREFIX) or name in RESERVED_ENV


def _no_operator_keys(field: str, read: "Callable[[Trainer], Mapping[str, str] | None]") -> Rule:
    """Returns the rule that a map has no keys of the operator, which finds, places and connects workers by them."""

    def operator_keys(trainer: "Trainer") -> list[str]:
        return [key for key in read(trainer) or () if key.startswith(OWN_PREFIX)]

    return Rule(
        cel=f"!has(self.{field}) || self.{field}.all(key, !key.startsWith('{OWN_PREFIX}'))",
        message=f"{OWN_PREFIX}* is reserved for the operator",
        holds=lambda trainer: not operator_keys(trainer),
        field=field,
        explain=lambda trainer: (
            f"{OWN_PREFIX}* is reserved for the operator; leave out: {', '.join(operator_keys(trainer))}"
        ),
    )


_RESERVED_LIST = "[" + ", ".join(f"'{name}'" for name in RESERVED_ENV) + "]"

StringMap = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]

_UserId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]


class Capability(StrEnum):
    DAC_OVERRIDE = "DAC_OVERRIDE"
    """Read and write files regardless of their owner."""
    IPC_LOCK = "IPC_LOCK"
    """Lock more memory than the limit allows, as libtpu does for transfers."""
    SYS_PTRACE = "SYS_PTRACE"
    """Look into other processes of the worker, as profilers do."""
    SYS_RESOURCE = "SYS_RESOURCE"
    """Raise limits, such as the one on locked memory (ulimit -l)."""


class Capabilities(ApiModel):
    add: Annotated[list[Capability], Field(min_length=1, max_length=4)] = Field(
        description="Linux capabilities to add; all others are dropped. Pod Security levels baseline and restricted"
        " refuse IPC_LOCK, SYS_PTRACE and SYS_RESOURCE."
    )


class SecurityContext(ApiModel):
    """The worker's user, the few capabilities that a TPU may need, and privilege, which is never the default.

    The namespace's Pod Security level decides which of these it allows.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        # Linux gives capabilities to other users only through files, which no-new-privileges rules out.
        Rule(
            cel="!has(self.capabilities) || (has(self.runAsUser) && self.runAsUser == 0)",
            message="only root can use added capabilities: set runAsUser: 0, or leave capabilities out",
            holds=lambda context: context.capabilities is None or context.run_as_user == 0,
            field="capabilities",
        ),
        Rule(
            cel="!self.privileged || (has(self.runAsUser) && self.runAsUser == 0)",
            message="only root can use privilege: set runAsUser: 0, or leave privileged out",
            holds=lambda context: not context.privileged or context.run_as_user == 0,
            field="privileged",
        ),
        Rule(
            cel="!self.privileged || !has(self.capabilities)",
            message="a privileged worker has every capability: leave capabilities out",
            holds=lambda context: not context.privileged or context.capabilities is None,
            field="capabilities",
        ),
    )

    run_as_user: _UserId | None = Field(
        None,
        description="User id of the worker; default the image's user, which must not be root. Pod Security level"
        " restricted refuses 0 (root).",
    )
    run_as_group: _UserId | None = Field(None, description="Primary group id of the worker.")
    fs_group: _UserId | None = Field(
        None, description="Group id that may write to the volumes, for filesystems whose top directory belongs to root."
    )
    supplemental_groups: Annotated[list[_UserId], Field(max_length=16)] | None = Field(
        None, description="Further group ids, for example the group of a shared filesystem or of a device."
    )
    capabilities: Capabilities | None = Field(None, description="Added Linux capabilities; needs runAsUser: 0.")
    privileged: Boolean = Field(
        False,
        description="Run the worker's container with every right over its node; needs runAsUser: 0. Pod Security levels"
        " baseline and restricted refuse it, and the entry check never has it.",
    )


class Trainer(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.entrypoint) != has(self.command)",
            message="give either entrypoint (module:callable, run by the trainer) or command (your own loop)",
            holds=lambda trainer: (trainer.entrypoint is None) != (trainer.command is None),
        ),
        Rule(
            cel="!has(self.args) || has(self.command)",
            message="args need command; an entrypoint takes its settings from recipe.parameters",
            holds=lambda trainer: trainer.args is None or trainer.command is not None,
            field="args",
        ),
        Rule(
            cel="!has(self.entrypoint) || !self.entrypoint.contains('.py:')",
            message="an entrypoint names a module, not its file: leave out .py, as in train:task",
            holds=lambda trainer: ".py:" not in (trainer.entrypoint or ""),
            field="entrypoint",
        ),
        Rule(
            cel="!has(self.volumeMounts) || self.volumeMounts.all(m,"
            " has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
            message="a mount needs a volume of the same name in spec.trainer.volumes",
            holds=lambda trainer: (
                {mount.name for mount in trainer.volume_mounts or ()}
                <= {volume.name for volume in trainer.volumes or ()}
            ),
            field="volumeMounts",
        ),
        Rule(
            cel="self.loop == 'BuiltIn' || (has(self.entrypoint) && self.backend != 'XLASPMD')",
            message="loop: Lightning trains an entrypoint's LightningModule, with backend XLA or Torch",
            holds=lambda trainer: (
                trainer.loop is Loop.BUILT_IN
                or (trainer.entrypoint is not None and trainer.backend is not BackendName.XLA_SPMD)
            ),
            field="loop",
        ),
        Rule(
            cel="!has(self.torch) || self.backend == 'Torch'",
            message="torch is only for backend: Torch",
            holds=lambda trainer: trainer.torch is None or trainer.backend is BackendName.TORCH,
            field="torch",
        ),
        Rule(
            cel="!has(self.command) || !has(self.torch) || !has(self.torch.execution)"
            " || self.torch.execution == 'Eager'",
            message="execution says how the trainer runs its steps; a command runs its own: call torch.compile there",
            holds=lambda trainer: (
                trainer.command is None or trainer.torch is None or trainer.torch.execution is Execution.EAGER
            ),
            field="torch.execution",
        ),
        Rule(
            cel=f"!has(self.env) || self.env.all(e, !e.name.startsWith('{ENV_PREFIX}')"
            f" && !(e.name in {_RESERVED_LIST}))",
            message=f"{ENV_PREFIX}* and {', '.join(RESERVED_ENV)} are set by the operator, torch_xla or libtpu",
            holds=lambda trainer: not any(_is_reserved(variable.name) for variable in trainer.env or ()),
            field="env",
            explain=lambda trainer: (
                "reserved for the operator, torch_xla or libtpu: "
                + ", ".join(variable.name for variable in trainer.env if _is_reserved(variable.name))
            ),
        ),
        Rule(
            cel="!has(self.sharedMemory) || !has(self.volumeMounts)"
            f" || !self.volumeMounts.exists(m, m.mountPath.matches('^{SHARED_MEMORY}/*$'))",
            message=f"the volume mounted at {SHARED_MEMORY} has its own size; leave sharedMemory out",
            holds=lambda trainer: trainer.shared_memory is None or not mounts_shared_memory(trainer),
            field="sharedMemory",
        ),
        _no_operator_keys("podLabels", lambda trainer: trainer.pod_labels),
        _no_operator_keys("podAnnotations", lambda trainer: trainer.pod_annotations),
    )

    image: Annotated[str, Field(min_length=1, max_length=1024, pattern=IMAGE_PATTERN)] = Field(
        description="Container image of the workers. `tpujob run` does not use it."
    )
    image_pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] | None = Field(
        None, description="When to pull the image: Always, IfNotPresent or Never, with the defaults of Kubernetes."
    )
    image_pull_secrets: (
        Annotated[list[LocalObjectReference], Field(max_length=16, json_schema_extra=map_by("name")), unique_by("name")]
        | None
    ) = Field(None, description="Secrets with credentials for the image's registry.")
    entrypoint: Annotated[str, Field(max_length=512, pattern=ENTRYPOINT_PATTERN)] | None = Field(
        None, description="Callable that returns the Task to train, as module:callable. The alternative is command."
    )
    loop: Loop = Field(
        Loop.BUILT_IN,
        description="The loop that trains a LightningModule. BuiltIn: the trainer's own, for modules with one"
        " optimizer. Lightning: Lightning's own Trainer, without some features of the recipe.",
    )
    code: Code | None = Field(
        None,
        description="Your code, in place of the image's working directory; each worker fetches, checks and unpacks it."
        " The image must have the trainer.",
    )
    backend: BackendName = Field(
        BackendName.XLA,
        description="What runs the training. XLA: torch_xla, one process per chip. XLASPMD: torch_xla, one process per"
        " host; the compiler divides the batch. Torch: torch.distributed.",
    )
    torch: TorchRuntime | None = Field(
        None, description="What backend Torch runs on; default device cpu with gloo. Only for backend Torch."
    )
    command: Annotated[list[LongText], Field(min_length=1, max_length=64)] | None = Field(
        None, description="Command to run your own training loop, once in every worker. The alternative is entrypoint."
    )
    args: Annotated[list[LongText], Field(max_length=256)] | None = Field(
        None, description="Arguments added to the command."
    )
    env: Annotated[list[EnvVar], Field(max_length=128, json_schema_extra=map_by("name")), unique_by("name")] | None = (
        Field(None, description="Environment variables; TPUJOB_* and those of torch_xla and libtpu are reserved.")
    )
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] | None = Field(
        None, description="ConfigMaps and Secrets whose keys become environment variables."
    )
    resources: Resources | None = Field(
        None,
        description="Compute resources of the worker container; the operator adds google.com/tpu. On TPU, the requests"
        " of cpu and memory default to three quarters of the machine; there are no other limits.",
    )
    shared_memory: Quantity | None = Field(
        None,
        description=f"Size limit of {SHARED_MEMORY}, for example 512Mi or 16Gi; its content counts as the container's"
        " memory. If left out, it may grow to the container's memory limit, or to the node's memory.",
    )
    volumes: (
        Annotated[list[Volume], Field(max_length=32, json_schema_extra=map_by("name")), unique_by("name")] | None
    ) = Field(None, description="Volumes that each worker pod can mount.")
    volume_mounts: (
        Annotated[
            list[VolumeMount], Field(max_length=32, json_schema_extra=map_by("mountPath")), unique_by("mount_path")
        ]
        | None
    ) = Field(None, description="Where the worker container mounts the volumes.")
    service_account_name: ShortText | None = Field(
        None, description="Kubernetes service account of the worker pods; default the namespace's default account."
    )
    security_context: SecurityContext | None = Field(
        None,
        description="User, groups, capabilities and privilege of the worker. By default it runs as the image's user,"
        " which must not be root, without capabilities.",
    )
    host_network: Boolean = Field(
        False,
        description="Run on the nodes' own network. This gives more bandwidth between slices, but no Workload Identity"
        " and no network policies; Pod Security levels baseline and restricted refuse it.",
    )
    node_selector: StringMap | None = Field(
        None, description="Labels that a worker's node must have, besides those that slice asks for."
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = Field(
        None, description="Node taints that the worker pods tolerate, in addition to the taint of TPU nodes."
    )
    priority_class_name: ShortText | None = Field(
        None, description="PriorityClass of the worker pods; a gang without a free slice takes one of lower priority's."
    )
    runtime_class_name: ShortText | None = Field(
        None, description="RuntimeClass of all the job's pods, for example gvisor; their nodes must have it."
    )
    pod_labels: StringMap | None = Field(
        None, description=f"Labels added to the worker pods; none that begins with {OWN_PREFIX}."
    )
    pod_annotations: StringMap | None = Field(
        None, description=f"Annotations added to the worker pods; none that begins with {OWN_PREFIX}."
    )
    termination_grace_period_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = Field(
        30,
        description="Seconds between SIGTERM and SIGKILL, for a last checkpoint; GKE maintenance grants 3600 at most.",
    )

    @property
    def is_traceable(self) -> bool:
        """Whether the compile check can trace the job's step."""
        return self.entrypoint is not None and self.backend is BackendName.XLA and self.loop is Loop.BUILT_IN
