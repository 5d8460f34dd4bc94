"""Names and labels of everything a job owns. They are deterministic, so creating an object twice finds the first."""

import re
from dataclasses import dataclass

from tpu_training_operator.api import constants
from tpu_training_operator.domain.job.topology import SliceLayout


@dataclass(frozen=True, order=True)
class WorkerId:
    """One worker: its attempt, its slice, and its host within the slice (GKE's TPU_WORKER_ID)."""

    attempt: int
    slice: int
    host: int

    @staticmethod
    def of_pod(name: str) -> "WorkerId | None":
        """Returns the worker that `pod_name` names; None for a name of any other form."""
        indices = name.split("-")[-3:]
        if len(indices) < 3 or not all(index.isascii() and index.isdigit() for index in indices):
            return None
        return WorkerId(*map(int, indices))

    def pod_name(self, job: str) -> str:
        return f"{job}-{self.attempt}-{self.slice}-{self.host}"


def placeholder_name(job: str, option: int, worker: WorkerId) -> str:
    """Returns the name of the pod that holds a node for a worker on this option. No worker has such a name."""
    return f"{job}-hold{option}-{worker.slice}-{worker.host}"


_PLACEHOLDER = re.compile(r"-hold[0-9]{1,3}-[0-9]{1,3}-[0-9]{1,4}")


def is_placeholder(pod: str, job: str) -> bool:
    return pod.startswith(job) and _PLACEHOLDER.fullmatch(pod, len(job)) is not None


def placeholder_slice(pod: str) -> int:
    return int(pod.split("-")[-2])


def leads_a_slice(placeholder: str) -> bool:
    """Returns whether the placeholder of this name holds a node for host 0."""
    return placeholder.endswith("-0")


def workers(layout: SliceLayout, attempt: int) -> list[WorkerId]:
    """Returns all workers of an attempt, ordered by `host_index`."""
    return [
        WorkerId(attempt, slice_index, host)
        for slice_index in range(layout.slices)
        for host in range(layout.hosts_per_slice)
    ]


def service_name(job: str) -> str:
    return job


def config_map_name(job: str, attempt: int) -> str:
    return f"{job}-{attempt}"


def env_config_map_name(job: str, attempt: int) -> str:
    return f"{config_map_name(job, attempt)}-env"


def config_map_names(job: str, attempt: int) -> tuple[str, str]:
    """Returns the names of all ConfigMaps of an attempt."""
    return config_map_name(job, attempt), env_config_map_name(job, attempt)


def host_index(layout: SliceLayout, worker: WorkerId) -> int:
    """Returns the worker's index among the hosts of all slices."""
    return worker.slice * layout.hosts_per_slice + worker.host


def hostname(layout: SliceLayout, worker: WorkerId) -> str:
    """Returns the pod's hostname. It is short, because TPU_WORKER_HOSTNAMES lists a whole slice, and contains the
    attempt, because an old worker on a lost node may still be in DNS."""
    return f"{worker.attempt}-{host_index(layout, worker)}"


def dns_name(job: str, layout: SliceLayout, worker: WorkerId) -> str:
    """Returns the worker's DNS name in its namespace, through the headless Service. It is short, because one variable
    holds a list of them, and because a resolver asks for longer names three times."""
    return f"{hostname(layout, worker)}.{service_name(job)}"


def leader_dns_name(job: str, namespace: str, layout: SliceLayout, attempt: int) -> str:
    """Returns the full DNS name of host 0, where the gang meets. A resolver that does not find the short name yet would
    ask for a Service named like the hostname in a namespace named like the job, which may be another team's."""
    return f"{dns_name(job, layout, WorkerId(attempt, 0, 0))}.{namespace}.svc"


_NOT_IN_A_VARIABLE = re.compile("[^A-Z0-9]")


def parameter_variable(parameter: str) -> str:
    """Returns the environment variable of a recipe's parameter: upper case, with _ for what a shell would not take."""
    return "TPUJOB_PARAMETER_" + _NOT_IN_A_VARIABLE.sub("_", parameter.upper())


def entry_check_pod_name(job: str) -> str:
    """Returns the name of the entry check's pod, which no worker has."""
    return f"{job}-entry-check"


def pod_name(job: str, worker: WorkerId) -> str:
    """Returns the name of a worker's pod, or of the entry check's, which is attempt 0."""
    return worker.pod_name(job) if worker.attempt else entry_check_pod_name(job)


def gang_selector(job: str) -> dict[str, str]:
    return {constants.LABEL_JOB_NAME: job}


def job_labels(job: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": constants.MANAGER,
        "app.kubernetes.io/component": "worker",
        **gang_selector(job),
    }


def entry_check_labels(job: str) -> dict[str, str]:
    return job_labels(job) | {
        "app.kubernetes.io/component": constants.ROLE_ENTRY_CHECK,
        constants.LABEL_ROLE: constants.ROLE_ENTRY_CHECK,
    }


def worker_labels(job: str, worker: WorkerId, option: int = 0) -> dict[str, str]:
    option_label = {constants.LABEL_ALTERNATIVE: str(option)} if option else {}
    return (
        job_labels(job)
        | option_label
        | {
            constants.LABEL_ATTEMPT: str(worker.attempt),
            constants.LABEL_SLICE_INDEX: str(worker.slice),
            constants.LABEL_HOST_INDEX: str(worker.host),
        }
    )


def slice_id(uid: str, worker: WorkerId) -> str:
    """Returns an id of one slice of one attempt, unique in the cluster. A label value has at most 63 characters."""
    return f"{uid.replace('-', '')}-{worker.attempt}-{worker.slice}"
