"""What the operator keeps in memory of jobs and pods: compact JSON, which is parsed for a pass.

As Python objects they would take several times as much. Memory is bounded although users decide how many jobs there are
and how large: of a job that is large or has finished, and of any job when the budget is used up, only what the resync
reads is kept. A pass over such a job reads it from the API server.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum, auto

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, slim_worker
from tpu_training_operator.domain.cluster_state.ownership import job_of
from tpu_training_operator.domain.cluster_state.workload import manager_of, owes_an_end
from tpu_training_operator.domain.plan.at_rest import is_at_rest
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.encoding import encoded
from tpu_training_operator.kube.replica import Change, Name, Replica, Version
from tpu_training_operator.runtime.resync import slim_job

_LARGEST_JOB = 64 * 2**10
_ALL_JOBS = 64 * 2**20
_MOST_ENDS = 1000
_WITH_WORKERS = (State.STARTING, State.RUNNING, State.RESTARTING)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """`slim`: what the resync reads. `whole`: the job as the API server has it; None: read it there. `is_at_rest`: it
    has finished, and so has its Workload, if it has one; or it is suspended. `attempt`, `hosts`: of the workers that
    its status says it has, which stand idle while it `is_restarting`."""

    slim: bytes
    whole: bytes | None
    is_at_rest: bool = False
    attempt: int = 0
    hosts: int = 0
    is_restarting: bool = False


class Stage(IntEnum):
    """How far a worker's pod is."""

    NEW = auto()
    ADDRESSED = auto()
    READY = auto()
    STOPPING = auto()
    ENDED = auto()

    @staticmethod
    def of(pod: WorkerPod) -> "Stage":
        if pod.has_ended:
            return Stage.ENDED
        if pod.is_terminating:
            return Stage.STOPPING
        return Stage.READY if pod.is_ready else Stage.ADDRESSED if pod.addresses else Stage.NEW


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A worker's slim pod. `job`: whose gang its label says it is in. `is_hint`: whether that is also its controller:
    anyone may set a label, and every pass costs what all jobs share. `attempt`: by its name; 0 if that is another."""

    job: str
    is_hint: bool
    attempt: int
    stage: Stage
    body: bytes

    @property
    def has_ended(self) -> bool:
        return self.stage is Stage.ENDED


def keep_job(job: Object) -> JobRecord:
    slim = slim_job(job)
    # A job whose memory is short differs from its next version all the same.
    slim["metadata"]["resourceVersion"] = job["metadata"]["resourceVersion"]
    if slim["status"].get("completionTime") is not None:
        return JobRecord(encoded(slim), None, is_at_rest=not owes_an_end(job))
    whole, status = encoded(job), job.get("status") or {}
    has_workers = status.get("state") in _WITH_WORKERS and not manager_of(job)
    attempt = int(status.get("attempt") or 0)
    return JobRecord(
        encoded(slim),
        whole if len(whole) <= _LARGEST_JOB else None,
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
    # A version of its own would make every change of the pod look like one that matters.
    slim["metadata"].pop("resourceVersion", None)
    seen = WorkerPod(slim)
    attempt = seen.named_worker.attempt if seen.named_worker else 0
    return PodRecord(label, label == job_of(pod), attempt, Stage.of(seen), encoded(slim))


class KnownJobs(Replica[JobRecord]):
    """`budget`: bytes of all whole jobs together."""

    def __init__(self, budget: int = _ALL_JOBS) -> None:
        super().__init__()
        self._left_over = budget

    def _entering(self, name: Name, kept: JobRecord) -> JobRecord:
        size = len(kept.whole or b"")
        if size > self._left_over:
            return replace(kept, whole=None)
        self._left_over -= size
        return kept

    def _left(self, name: Name, kept: JobRecord) -> None:
        self._left_over += len(kept.whole or b"")


class KnownPods(Replica[PodRecord]):
    """Finds the pods of a gang without looking at all others."""

    def __init__(self) -> None:
        super().__init__()
        self._gangs: dict[Name, dict[Name, None]] = {}
        # By the gang's namespace, job and attempt.
        self._stages: dict[tuple[str, str, int], Counter[Stage]] = {}
        # How the pods that went last were at their end.
        self._ends: OrderedDict[Name, bytes] = OrderedDict()

    def deleted(self, version: Version[PodRecord]) -> Change[PodRecord] | None:
        if version.kept is not None:
            self._ends[version.name] = version.kept.body
            self._ends.move_to_end(version.name)
            if len(self._ends) > _MOST_ENDS:
                self._ends.popitem(last=False)
        return super().deleted(version)

    def end_of(self, name: Name) -> bytes | None:
        """The last version of a pod that the watch has told to be gone; None if that was long ago."""
        return self._ends.get(name)

    def gang(self, namespace: str, job: str) -> Iterator[tuple[Name, PodRecord]]:
        for name in self._gangs.get((namespace, job), ()):
            if (record := self.get(name)) is not None:
                yield name, record

    def count(self, namespace: str, like: PodRecord) -> int:
        """How many pods of its attempt are as far as this one."""
        return self._stages.get((namespace, like.job, like.attempt), Counter())[like.stage]

    def _entering(self, name: Name, kept: PodRecord) -> PodRecord:
        self._gangs.setdefault((name[0], kept.job), {})[name] = None
        self._stages.setdefault((name[0], kept.job, kept.attempt), Counter())[kept.stage] += 1
        return kept

    def _left(self, name: Name, kept: PodRecord) -> None:
        gang = self._gangs[name[0], kept.job]
        del gang[name]
        if not gang:
            del self._gangs[name[0], kept.job]
        attempt = name[0], kept.job, kept.attempt
        self._stages[attempt][kept.stage] -= 1
        if not self._stages[attempt].total():
            del self._stages[attempt]
