"""Workers of later attempts than the status knows, and what they prove (`plan` says how they come about)."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod

# No read of a job is older than this.
_OLDEST_READ = timedelta(minutes=5)
# Names have room for numbers below this one. A pod with a larger one is forged.
_MOST_ATTEMPTS = 99_999


def unknown_workers(observed: Observed, attempt: int) -> list[WorkerPod]:
    """Returns the workers of attempts that are later than this one."""
    return [pod for pod in observed.pods if attempt < pod.worker.attempt < _MOST_ATTEMPTS]


def may_be_news(unknown: Sequence[WorkerPod], now: datetime) -> bool:
    """Whether the attempts of these workers may have begun since the job was read. If not, its status is wrong."""
    return now < min(pod.created for pod in unknown) + _OLDEST_READ
