"""What to do about workers of an attempt that the status does not know.

Only the operator raises the attempt, in the status, before it creates a worker of it. So there are three ways to see
such workers:

- Another operator has moved on since the job was read. The next read shows it.
- The status was lost as a whole, by an edit or a restored backup. Then the workers' attempt is the only truth left.
- Somebody else created them: whoever may create pods can copy labels and owner references.

So where the status knows of an attempt, it is believed and such pods are not. They are not touched either: the job may
have been read long ago, and they may be workers of a gang that runs. The next attempt has a number that none of them
has (`Situation.next_attempt`), and deletes those that it leaves behind.
"""

from dataclasses import replace
from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture
from tpu_training_operator.domain.lifecycle.context import Situation
from tpu_training_operator.domain.observed import format_time

_SOON = timedelta(seconds=1)
# No read is as old.
_LONG = timedelta(minutes=5)


def is_behind(here: Situation) -> bool:
    """Whether another operator may have raised the attempt since the job was read."""
    later = (pod for pod in here.observed.pods if pod.worker.attempt > here.attempt)
    return any(here.now < pod.created + _LONG for pod in later)


def wait_for_news() -> Plan:
    return Plan(again=_SOON)


def take_up(here: Situation) -> Plan:
    """The status knows of no attempt, and there are workers."""
    pods = here.observed.pods
    if here.now < min(pod.created for pod in pods) + _LONG:
        return wait_for_news()
    attempt = max(pod.worker.attempt for pod in pods)
    message = f"the status was lost; attempt {attempt} goes on, and what was before it does not count any more"
    picture = Picture(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)
    status = replace(
        here.status,
        attempt=attempt,
        resolved=here.resolution.resolved,
        start_time=here.status.start_time or format_time(here.now),
    )
    status = here.mark(status, ConditionType.GANG_READY, False, picture.reason, message)
    return Plan(
        status=here.present(status, picture),
        events=(Event("StatusLost", message, warning=True),),
        again=timedelta(0),
    )
