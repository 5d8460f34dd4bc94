"""Decides on which nodes a worker may run: node selector, affinity and tolerations."""

from collections.abc import Sequence
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.slice import Formation, Hardware, Provisioning, ProvisioningType, Reservation
from tpu_training_operator.domain.job.naming import WorkerId, slice_id, worker_labels
from tpu_training_operator.domain.job.recipe.resolve import Resolution

Object = dict[str, Any]

# By default Kubernetes waits five minutes, while a lost host holds up the whole slice.
_DEAD_NODE_TOLERATION_SECONDS = 30
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_UNTAINTED = {
    constants.NODE_LABEL_RESERVATION_PROJECT,
    constants.NODE_LABEL_RESERVATION_BLOCK,
    constants.NODE_LABEL_RESERVATION_SUBBLOCK,
}


def node_selector(job: TPUTrainingJob, resolution: Resolution) -> dict[str, str]:
    selector = dict(job.spec.trainer.node_selector or {})
    shape = resolution.layout.shape
    if job.spec.slice.hardware is Hardware.TPU and shape.machine_type is not None:
        selector |= {
            constants.NODE_LABEL_ACCELERATOR: shape.machine_type.label,
            # Nodes of a sub-slice have the topology of the whole pool.
            **({} if _is_sub_slice(job) else {constants.NODE_LABEL_TOPOLOGY: shape.topology}),
            # The two labels above are the same for two hosts of 4 chips and one of 8 (2x4 on v5e and v6e).
            constants.NODE_LABEL_CHIPS_PER_HOST: str(shape.chips_per_host),
            **_capacity(job.spec.slice.provisioning),
        }
    return selector


def affinity(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId, avoid: Sequence[str]) -> Object:
    """Returns the worker's affinity. `avoid`: names of nodes."""
    ways, label = _affinity_of_reservation(job), _slice_label(job, resolution)
    if job.spec.slice.hardware is Hardware.TPU and label != constants.NODE_LABEL_NODE_POOL:
        ways = [[{"key": label, "operator": "Exists"}, *way] for way in ways or [[]]]
    return _pool_affinity(job, resolution, worker) | _node_affinity(ways, avoid)


def tolerations(job: TPUTrainingJob) -> list[Object]:
    user_tolerations = [t.model_dump(by_alias=True, exclude_none=True) for t in job.spec.trainer.tolerations or ()]
    lost = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _DEAD_NODE_TOLERATION_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]
    if job.spec.slice.hardware is Hardware.CPU:
        return [*user_tolerations, *lost]
    tainted = {constants.TPU_RESOURCE: "present", **_tainted_capacity(job.spec.slice.provisioning)}
    tpu = [{"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in tainted.items()]
    return [*user_tolerations, *tpu, *lost]


_LABELS = {
    ProvisioningType.SPOT: constants.NODE_LABEL_SPOT,
    ProvisioningType.FLEX_START: constants.NODE_LABEL_FLEX_START,
    ProvisioningType.QUEUED: constants.NODE_LABEL_QUEUED,
}


def _capacity(provisioning: Provisioning | None) -> dict[str, str]:
    """Returns GKE's node labels for the provisioning. Its autoscaler creates nodes for pods that select them."""
    if provisioning is None:
        return {}
    reservation = _reservation(provisioning)
    labels = {
        **({_LABELS[provisioning.type]: "true"} if provisioning.type in _LABELS else {}),
        constants.NODE_LABEL_RESERVATION: reservation and reservation.name,
        constants.NODE_LABEL_RESERVATION_PROJECT: reservation and reservation.project,
        constants.NODE_LABEL_RESERVATION_BLOCK: reservation and reservation.block,
        constants.NODE_LABEL_RESERVATION_SUBBLOCK: reservation and reservation.subblock,
    }
    return {label: value for label, value in labels.items() if value is not None}


def _tainted_capacity(provisioning: Provisioning | None) -> dict[str, str]:
    """Returns the labels that are also taints.

    GKE taints nodes with the label of their capacity, and nodes that its autoscaler creates for a reservation with the
    reservation's name (GKE's Cluster Toolkit, pkg/orchestrator/gke: resolveReservationTolerations).
    """
    return {label: value for label, value in _capacity(provisioning).items() if label not in _UNTAINTED}


def _reservation(provisioning: Provisioning | None) -> Reservation | None:
    name = provisioning and provisioning.reservation
    return Reservation.parse(name) if name else None


def _affinity_of_reservation(job: TPUTrainingJob) -> list[list[Object]]:
    """Returns two alternatives: node pools that the autoscaler creates, and node pools that people create.

    The autoscaler creates nodes of a specific reservation for pods that ask for reservation-affinity: specific, and
    sets that label itself (gke-autoscaling, pkg/cloudprovider/gke/labels: systemLabelsAddedByClusterAutoscaler). A pool
    that people created has only the reservation's name, so the label cannot be required there. The autoscaler reads
    `In` from any alternative and skips `DoesNotExist` (pkg/podrequirements: getNodeAffinities).
    """
    if job.spec.slice.hardware is Hardware.CPU or _reservation(job.spec.slice.provisioning) is None:
        return []
    key = constants.NODE_LABEL_RESERVATION_AFFINITY
    return [[{"key": key, "operator": "In", "values": ["specific"]}], [{"key": key, "operator": "DoesNotExist"}]]


def _is_sub_slice(job: TPUTrainingJob) -> bool:
    return job.spec.slice.formation is Formation.SUB_SLICE


def _slice_label(job: TPUTrainingJob, resolution: Resolution) -> str:
    """Returns the label that has one value on all nodes of a slice, and another one on those of other slices."""
    if _is_sub_slice(job):
        return constants.NODE_LABEL_SUB_SLICE.format(topology=resolution.layout.shape.topology)
    is_dynamic = job.spec.slice.formation is Formation.DYNAMIC_SLICE
    return constants.NODE_LABEL_DYNAMIC_SLICE if is_dynamic else constants.NODE_LABEL_NODE_POOL


def pool_labels(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId) -> dict[str, str]:
    """Returns the label that claims a node pool for a slice. Only worker 0 has it: see `_pool_affinity`."""
    return {constants.LABEL_SLICE_ID: slice_id(job.uid, worker)} if _leads_a_pool(job, resolution, worker) else {}


def _pool_affinity(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId) -> Object:
    """Returns the affinity that keeps each slice in one node pool: a pool is exactly one slice, and pools have no
    interconnect. Of a larger pool that is divided, or of pools that are joined, the same holds for each slice in it.

    Worker 0 requires a pool without the worker 0 of another slice, and the others require its pool. When worker 0
    preempts other pods, the scheduler looks for victims on one node at a time, so only one pod may keep others out of
    the pool.

    A worker 0 that is created again requires the pool where its peers are; without peers, that term does not apply. It
    prefers pools where no workers of other jobs are still stopping.
    """
    if not _fills_a_pool(job, resolution):
        return {}
    label = _slice_label(job, resolution)
    own_slice = {"key": constants.LABEL_SLICE_ID, "operator": "In", "values": [slice_id(job.uid, worker)]}
    if not _leads_a_pool(job, resolution, worker):
        return {"podAffinity": {_REQUIRED: [_in_pool(label, own_slice)]}}
    labels = worker_labels(job.name, worker)
    same = [
        {"key": key, "operator": "In", "values": [labels[key]]}
        for key in (constants.LABEL_JOB_NAME, constants.LABEL_ATTEMPT, constants.LABEL_SLICE_INDEX)
    ]
    others = _in_pool(
        label, {"key": constants.LABEL_SLICE_ID, "operator": "Exists"}, {**own_slice, "operator": "NotIn"}
    )
    stopping = _in_pool(label, {"key": constants.LABEL_SLICE_INDEX, "operator": "Exists"})
    return {
        "podAffinity": {_REQUIRED: [_in_pool(label, *same, everywhere=False)]},
        "podAntiAffinity": {_REQUIRED: [others], _PREFERRED: [{"weight": 100, "podAffinityTerm": stopping}]},
    }


def _fills_a_pool(job: TPUTrainingJob, resolution: Resolution) -> bool:
    return job.spec.slice.hardware is Hardware.TPU and resolution.layout.hosts_per_slice > 1


def _leads_a_pool(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId) -> bool:
    return worker.host == 0 and _fills_a_pool(job, resolution)


def _node_affinity(ways: Sequence[Sequence[Object]], avoid: Sequence[str]) -> Object:
    """Returns one term for each way in which a node may be labelled.

    A node has to meet all requirements of one term, so each term lists the nodes to avoid. A field can be compared with
    only one value, so each node needs its own requirement.
    """
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid]
    common = {"matchFields": others} if others else {}
    terms = [{"matchExpressions": list(way), **common} for way in ways] or ([common] if others else [])
    if not terms:
        return {}
    return {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}


def _in_pool(label: str, *expressions: Object, everywhere: bool = True) -> Object:
    """Returns a term that selects pods on nodes with the same value of the label, in all namespaces or only in the
    pod's."""
    return {
        "labelSelector": {"matchExpressions": list(expressions)},
        "topologyKey": label,
        **({"namespaceSelector": {}} if everywhere else {}),
    }
