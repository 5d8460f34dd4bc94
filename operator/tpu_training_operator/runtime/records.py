"""The operator's memory of jobs and pods: compact JSON, which is parsed for a pass.

Python objects would take several times as much. Memory is bounded, although users decide how many jobs there are and
how large they are: of a job that is large or has finished, and of any job when the room is used up, only the fields
that the resync reads are kept. A pass over such a job reads it from the API server.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.multikueue import manager_of
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, slim_worker
from tpu_training_operator.domain.cluster_state.ownership import job_of
from tpu_training_operator.domain.cluster_state.workload import owes_an_end
from tpu_training_operator.domain.plan.at_rest import is_at_rest
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.encoding import encode
from tpu_training_operator.kube.replica import Change, Name, Replica, Version
from tpu_training_operator.runtime.resync import slim_job

_LARGEST_JOB = 64 * 2**10
_ALL_JOBS = 64 * 2**20
_MOST_ENDS = 1000
_WITH_WORKERS = (State.STARTING, State.RUNNING, State.RESTARTING)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, as JSON.

    `slim`: the fields that the resync reads. `full`: the job as the API server has it; None: it must be read there.
    `is_at_rest`: it is suspended, or it has finished and so has its Workload, if it has one. `attempt`, `hosts`: of the
    workers that its status says it has, which stand idle while it `is_restarting`. `is_as_created`: the watch has shown
    that this is its first version; a list cannot tell.
    """

    slim: bytes
    full: bytes | None
    is_at_rest: bool = False
    attempt: int = 0
    hosts: int = 0
    is_restarting: bool = False
    is_as_created: bool = field(default=False, compare=False)


class PodStage(IntEnum):
    """The stages of a worker's pod, in their order."""

    NEW = auto()
    ADDRESSED = auto()
    READY = auto()
    STOPPING = auto()
    ENDED = auto()

    @staticmethod
    def of(pod: WorkerPod) -> "PodStage":
        if pod.has_ended:
            return PodStage.ENDED
        if pod.is_terminating:
            return PodStage.STOPPING
        return PodStage.READY if pod.is_ready else PodStage.ADDRESSED if pod.addresses else PodStage.NEW


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A worker's slim pod. `job`: the job that its label names. `is_hint`: whether that job is also its controller:
    anyone may set a label, and all jobs share the cost of passes. `attempt`: from its name; 0 if it has no worker's
    name."""

    job: str
    is_hint: bool
    attempt: int
    stage: PodStage
    body: bytes

    @property
    def has_ended(self) -> bool:
        return self.stage is PodStage.ENDED


def keep_job(job: Object) -> JobRecord:
    slim = slim_job(job)
    # Two versions of a job must differ, even if nothing else of them is kept.
    slim["metadata"]["resourceVersion"] = job["metadata"]["resourceVersion"]
    if slim["status"].get("completionTime") is not None:
        return JobRecord(encode(slim), None, is_at_rest=not owes_an_end(job))
    full, status = encode(job), job.get("status") or {}
    has_workers = status.get("state") in _WITH_WORKERS and not manager_of(job)
    attempt = int(status.get("attempt") or 0)
    return JobRecord(
        encode(slim),
        full if len(full) <= _LARGEST_JOB else None,
        is_at_rest=is_at_rest(job),
        attempt=attempt,
        hosts=int((status.get("resolved") or {}).get("hosts") or 0) if has_workers and attempt else 0,
        is_restarting=has_workers and status.get("state") == State.RESTARTING,
    )


def keep_pod(pod: Object) -> PodRecord | None:
    label = (pod["metadata"].get("labels") or {}).get(LABEL_JOB_NAME)
    slim = slim_worker(pod)
    if label is None or slim is None:
        return None
    # With its version, every change of the pod would look relevant.
    slim["metadata"].pop("resourceVersion", None)
    worker = WorkerPod(slim)
    attempt = worker.named_worker.attempt if worker.named_worker else 0
    return PodRecord(label, label == job_of(pod), attempt, PodStage.of(worker), encode(slim))


class KnownJobs(Replica[JobRecord]):
    """`room`: bytes of all full jobs together."""

    def __init__(self, room: int = _ALL_JOBS) -> None:
        super().__init__()
        self._left_over = room

    def _before_storing(self, name: Name, record: JobRecord) -> JobRecord:
        size = len(record.full or b"")
        if size > self._left_over:
            return replace(record, full=None)
        self._left_over -= size
        return record

    def _after_removal(self, name: Name, record: JobRecord) -> None:
        self._left_over += len(record.full or b"")


class KnownPods(Replica[PodRecord]):
    """Finds the pods of a gang without a search through all pods."""

    def __init__(self) -> None:
        super().__init__()
        self._gangs: dict[Name, dict[Name, None]] = {}
        # The number of pods in each stage, by the gang's namespace, job and attempt.
        self._stages: dict[tuple[str, str, int], Counter[PodStage]] = {}
        # The last versions of the pods that were deleted last.
        self._ends: OrderedDict[Name, bytes] = OrderedDict()

    def apply_deletion(self, version: Version[PodRecord]) -> Change[PodRecord] | None:
        if version.record is not None:
            self._ends[version.name] = version.record.body
            self._ends.move_to_end(version.name)
            if len(self._ends) > _MOST_ENDS:
                self._ends.popitem(last=False)
        return super().apply_deletion(version)

    def end_of(self, name: Name) -> bytes | None:
        """Returns the last version of a pod that was deleted; None if that was long ago."""
        return self._ends.get(name)

    def gang(self, namespace: str, job: str) -> Iterator[tuple[Name, PodRecord]]:
        for name in self._gangs.get((namespace, job), ()):
            if (record := self.get(name)) is not None:
                yield name, record

    def count(self, namespace: str, like: PodRecord) -> int:
        """Returns the number of pods of the same attempt in the same stage."""
        return self._stages.get((namespace, like.job, like.attempt), Counter())[like.stage]

    def _before_storing(self, name: Name, record: PodRecord) -> PodRecord:
        self._gangs.setdefault((name[0], record.job), {})[name] = None
        self._stages.setdefault((name[0], record.job, record.attempt), Counter())[record.stage] += 1
        return record

    def _after_removal(self, name: Name, record: PodRecord) -> None:
        gang = self._gangs[name[0], record.job]
        del gang[name]
        if not gang:
            del self._gangs[name[0], record.job]
        attempt = name[0], record.job, record.attempt
        self._stages[attempt][record.stage] -= 1
        if not self._stages[attempt].total():
            del self._stages[attempt]
