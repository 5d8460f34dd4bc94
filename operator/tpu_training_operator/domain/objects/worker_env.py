"""Builds the environment of a worker's container.

It must not set TPU_PROCESS_BOUNDS, TPU_CHIPS_PER_PROCESS_BOUNDS, TPU_VISIBLE_CHIPS, CLOUD_TPU_TASK_ID,
TPU_PROCESS_ADDRESSES or TPU_PROCESS_PORT: torch_xla sets them for each process with setdefault, and a value for the
whole host would give it wrong bounds. GKE's device plugin provides TPU_SKIP_MDS_QUERY and the topology.
"""

from collections.abc import Mapping
from typing import Any

from tpu_contract import protocol
from tpu_contract.slice_check import ENV_EXPECTED_CHIPS, ENV_NODE_NAME, ExpectedChips, expected_to_json
from tpu_training_operator.api import constants
from tpu_training_operator.api.catalogue import HOST_BLOCKS, generations
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.run_policy import SliceCheckPolicy
from tpu_training_operator.api.slice import Formation, Hardware
from tpu_training_operator.api.trainer import BackendName, Code, TorchRuntime
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job import naming
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.recipe.checkpointing import folder
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.topology import SliceLayout

EnvVar = dict[str, Any]

_NODE_NAME = {"fieldRef": {"fieldPath": "spec.nodeName"}}

# GKE's device plugin uses it instead of a host name on slices of one host.
_LOCALHOST = "localhost"

# Users may set this variable themselves.
_PROCESSES = "PET_NPROC_PER_NODE"

# In this time all processes must have compiled the same step. TorchTPU's own 60 s are too little for a large model.
_HANDSHAKE_SECONDS = 1800

# torch's compiler cache asks for the user's name and home, and fails for a uid without a passwd entry.
CONTAINER_USER = {"HOME": "/tmp", "USER": "trainer"}  # noqa: S108 - a path inside the container


def hosts_key(slice_index: int) -> str:
    """Returns the ConfigMap's key for the host names of one slice, separated by commas in the order of
    TPU_WORKER_ID."""
    return f"hosts-{slice_index}"


def shared_env(job: TPUTrainingJob, resolution: Resolution, attempt: int) -> dict[str, str]:
    """Returns the variables that are the same for all workers of an attempt. The kubelet takes them literally."""
    layout, trainer = resolution.layout, job.spec.trainer
    leader = naming.leader_dns_name(job.name, job.namespace, layout, attempt)
    values = {
        # A single host needs no DNS.
        protocol.ENV_MASTER_ADDR: leader if layout.hosts > 1 else _LOCALHOST,
        protocol.ENV_MASTER_PORT: str(constants.RENDEZVOUS_PORT),
        **_recipe_env(job, resolution),
        protocol.ENV_NUM_HOSTS: str(layout.hosts),
        "TPUJOB_ATTEMPT": str(attempt),
        protocol.ENV_TERMINATION_LOG: constants.TERMINATION_LOG,
        protocol.ENV_RUN_SPEC: f"{constants.RUN_SPEC_DIRECTORY}/{constants.RUN_SPEC_FILE}",
        **(_torchrun_hosts_env(job, resolution, leader) if _is_torchrun(job) else {}),
        **_code_env(trainer.code),
        **CONTAINER_USER,
        **_dynamic_slice_env(job, layout),
        **_torch_tpu_env(job, layout),
        **_slice_check_env(job, layout),
    }
    if trainer.backend is not BackendName.TORCH:
        # TPU or CPU: the PJRT client that torch_xla starts.
        values["PJRT_DEVICE"] = job.spec.slice.hardware.value
    if layout.slices > 1:
        values |= {
            "MEGASCALE_COORDINATOR_ADDRESS": leader,
            "MEGASCALE_NUM_SLICES": str(layout.slices),
            "MEGASCALE_PORT": str(constants.MEGASCALE_PORT),
        }
    return values


def worker_env(
    job: TPUTrainingJob, resolution: Resolution, worker: WorkerId, reporting: Reporting | None = None
) -> list[EnvVar]:
    """Returns the worker's variables beside the shared ones, which the user's can refer to as $(NAME).

    The user cannot override the operator's, because their names are reserved. `reporting`: where this worker reports
    to; None if it does not.
    """
    layout, trainer = resolution.layout, job.spec.trainer
    index = str(naming.host_index(layout, worker))
    values = {
        "TPU_WORKER_ID": str(worker.host),
        # The name that an Indexed Job uses.
        "JOB_COMPLETION_INDEX": str(worker.host),
        protocol.ENV_HOST_INDEX: index,
        "TPUJOB_SLICE_INDEX": str(worker.slice),
    }
    if _is_torchrun(job):
        values["PET_NODE_RANK"] = index
    if layout.slices > 1:
        values["MEGASCALE_SLICE_ID"] = str(worker.slice)
    if reporting is not None:
        values |= _reporting_env(job, reporting)
    user = [variable.model_dump(by_alias=True, exclude_none=True) for variable in trainer.env or ()]
    user_names = _user_names(job)
    defaults = _rank_env(job, resolution, worker) if _is_torchrun(job) else {}
    if trainer.torch is not None and trainer.torch.on_tpu:
        defaults |= {"NODE_RANK": index}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        _worker_host_names(job, layout, worker),
        *([{"name": ENV_NODE_NAME, "valueFrom": _NODE_NAME}] if _checks_slice(job) else []),
        *({"name": name, "value": value} for name, value in defaults.items() if name not in user_names),
        *user,
    ]


def literal_variables(env: Mapping[str, str]) -> list[EnvVar]:
    """Returns the variables for the body of a pod. The kubelet takes $(NAME) there for a reference, and $$ for a
    dollar."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in env.items()]


def _is_torchrun(job: TPUTrainingJob) -> bool:
    """Returns whether the hosts of the user's own loop meet through torch.distributed. With torch_xla, libtpu joins
    them, and torch_xla would take RANK as a sign of torchrun."""
    return job.spec.trainer.command is not None and job.spec.trainer.backend is BackendName.TORCH


def _user_names(job: TPUTrainingJob) -> set[str]:
    return {variable.name for variable in job.spec.trainer.env or ()}


def _recipe_env(job: TPUTrainingJob, resolution: Resolution) -> dict[str, str]:
    recipe = resolution.recipe
    values = {
        "TPUJOB_GLOBAL_BATCH_SIZE": str(recipe.batch.total),
        "TPUJOB_PER_REPLICA_BATCH_SIZE": str(recipe.batch.per_replica),
        "TPUJOB_ACCUMULATION_STEPS": str(recipe.batch.accumulation),
        "TPUJOB_TRAIN_STEPS": str(recipe.train_steps),
        "TPUJOB_LEARNING_RATE": recipe.learning_rate,
        "TPUJOB_WARMUP_STEPS": str(recipe.warmup_steps),
    }
    if job.spec.data is not None:
        values["TPUJOB_DATA_URI"] = job.spec.data.uri
    if job.spec.checkpoint is not None:
        values["TPUJOB_CHECKPOINT_URI"] = folder(job, job.spec.checkpoint)
        if job.spec.checkpoint.resume_from is not None:
            values["TPUJOB_CHECKPOINT_RESUME_FROM"] = job.spec.checkpoint.resume_from
    parameters = sorted((job.spec.recipe.parameters or {}).items())
    return values | {naming.parameter_variable(name): value for name, value in parameters}


def _code_env(code: Code | None) -> dict[str, str]:
    if code is None:
        return {}
    archive = f"{constants.CODE_ARCHIVE_DIRECTORY}/{constants.CODE_ARCHIVE_KEY}"
    return {
        protocol.ENV_CODE_DIRECTORY: constants.CODE_DIRECTORY,
        **({protocol.ENV_CODE_ARCHIVE: archive} if code.secret is not None else {}),
    }


def _torchrun_hosts_env(job: TPUTrainingJob, resolution: Resolution, leader: str) -> dict[str, str]:
    """Returns the options that join torchrun's hosts and start its processes; torchrun reads them from PET_*
    variables."""
    hosts, count = resolution.layout.hosts, (job.spec.trainer.torch or TorchRuntime()).processes_per_host
    values = {
        "PET_NNODES": str(hosts),
        "PET_MASTER_ADDR": leader if hosts > 1 else _LOCALHOST,
        "PET_MASTER_PORT": str(constants.RENDEZVOUS_PORT),
        _PROCESSES: str(count),
    }
    if count == 1:
        values["WORLD_SIZE"] = str(hosts)
    if _PROCESSES not in _user_names(job):
        # The share of one of torchrun's processes. Those are not replicas, which count TPU devices on any hardware.
        batch = resolution.recipe.batch
        values["TPUJOB_PER_PROCESS_BATCH_SIZE"] = str(batch.total // batch.accumulation // (hosts * count))
    return values


def _rank_env(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId) -> dict[str, str]:
    """Returns the rank of torchrun's only process on a host, so that a script also runs without torchrun
    (`env://`)."""
    if (job.spec.trainer.torch or TorchRuntime()).processes_per_host > 1:
        return {}
    return {"RANK": str(naming.host_index(resolution.layout, worker)), "LOCAL_RANK": "0"}


def _dynamic_slice_env(job: TPUTrainingJob, layout: SliceLayout) -> dict[str, str]:
    """Returns what GKE's device plugin cannot: it learns its node's topology before the slice is formed."""
    shape = layout.shape
    if job.spec.slice.formation is not Formation.DYNAMIC_SLICE or job.spec.slice.hardware is not Hardware.TPU:
        return {}
    return {
        "TPU_TOPOLOGY": shape.topology,
        "TPU_ACCELERATOR_TYPE": shape.accelerator_type,
        "TPU_HOST_BOUNDS": ",".join(map(str, shape.host_bounds)),
        "TPU_CHIPS_PER_HOST_BOUNDS": ",".join(map(str, HOST_BLOCKS.get(shape.chips_per_host, (1, 1, 1)))),
    }


def _torch_tpu_env(job: TPUTrainingJob, layout: SliceLayout) -> dict[str, str]:
    """Returns the variables that TorchTPU's `set_tpu_launch_env` would otherwise derive on the host.

    It sees only the chips of one host, not the topology of a slice with several. Given only the topology, it would open
    the chips to find the host's place, and number the hosts in another order than their names.
    """
    torch = job.spec.trainer.torch
    if torch is None or not torch.on_tpu:
        return {}
    shape = layout.shape
    sides = [*shape.topology.split("x"), "1", "1"][:3]
    # A chip with two devices has them as a fourth axis.
    per_chip = shape.devices // shape.chips
    values = {
        "TORCH_TPU_TOPOLOGY": ",".join(sides if per_chip == 1 else [*sides, str(per_chip)]),
        "TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S": str(_HANDSHAKE_SECONDS),
    }
    if torch.compile_cache is not None:
        values["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] = torch.compile_cache
    return values


def _reporting_env(job: TPUTrainingJob, reporting: Reporting) -> dict[str, str]:
    """Returns the trainer's variables, and those of Kubeflow Trainer (KEP-2779) that Hugging Face's callbacks use."""
    place = f"namespaces/{job.namespace}"
    return {
        protocol.ENV_PROGRESS_URL: (
            f"{reporting.url}/apis/{constants.API_VERSION}/{place}/{constants.PLURAL}/{job.name}/progress"
        ),
        protocol.ENV_PROGRESS_TOKEN_FILE: constants.PROGRESS_TOKEN_FILE,
        protocol.ENV_PROGRESS_CA_FILE: constants.PROGRESS_CA_FILE,
        protocol.ENV_KUBEFLOW_URL: (
            f"{reporting.url}/apis/trainer.kubeflow.org/v1alpha1/{place}/trainjobs/{job.name}/status"
        ),
        protocol.ENV_KUBEFLOW_TOKEN: constants.PROGRESS_TOKEN_FILE,
        protocol.ENV_KUBEFLOW_CA: constants.PROGRESS_CA_FILE,
    }


def _checks_slice(job: TPUTrainingJob) -> bool:
    command, length = job.spec.trainer.command, len(constants.SLICE_CHECK_COMMAND)
    is_check = command is not None and command[:length] == constants.SLICE_CHECK_COMMAND
    return is_check or job.spec.run_policy.slice_check is not SliceCheckPolicy.SKIP


def _slice_check_env(job: TPUTrainingJob, layout: SliceLayout) -> dict[str, str]:
    """Returns what a check of the slice compares its measurements with."""
    if not _checks_slice(job):
        return {}
    shape, generation = layout.shape, generations().get(layout.shape.generation)
    expected = ExpectedChips(shape.accelerator_type)
    if job.spec.slice.hardware is Hardware.TPU and generation is not None:
        expected = ExpectedChips(
            shape.accelerator_type,
            shape.chips_per_host,
            generation.devices_per_chip,
            float(generation.bf16_tflops_per_chip),
            float(generation.hbm_gb_per_second_per_chip),
            generation.ici_gb_per_second_per_chip * shape.links,
        )
    return {ENV_EXPECTED_CHIPS: expected_to_json(expected)}


def _worker_host_names(job: TPUTrainingJob, layout: SliceLayout, worker: WorkerId) -> EnvVar:
    """Returns the list of the worker's own slice. Like TPU_WORKER_ID it is in the pod itself, where GKE's webhook would
    add it otherwise."""
    if layout.hosts_per_slice == 1:
        return {"name": "TPU_WORKER_HOSTNAMES", "value": _LOCALHOST}
    reference = {"name": naming.config_map_name(job.name, worker.attempt), "key": hosts_key(worker.slice)}
    return {"name": "TPU_WORKER_HOSTNAMES", "valueFrom": {"configMapKeyRef": reference}}
