"""What to do when there are workers of an attempt that the status does not know. Called by `domain.plan`.

Another operator has moved on since the job was read, and nothing may rest on what was read. Or, when those workers have
been there for long, the status itself was lost, by an edit or a restored backup, and theirs is the attempt.
"""

from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.actions import Event, Plan
from tpu_training_operator.domain.observed import format_time
from tpu_training_operator.domain.picture import Kind, Picture
from tpu_training_operator.domain.situation import Situation

_SOON = timedelta(seconds=1)
# No read is as old.
_LONG = timedelta(minutes=5)


def behind(here: Situation) -> Plan:
    newer = [pod for pod in here.observed.pods if pod.worker.attempt > here.attempt]
    if here.now < max(pod.created for pod in newer) + _LONG:
        return Plan(again=_SOON)
    attempt = max(pod.worker.attempt for pod in newer)
    message = f"the status was lost; attempt {attempt} goes on, and what was before it does not count any more"
    picture = Picture(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)
    update = {
        "attempt": attempt,
        "resolved": here.resolution.resolved,
        "start_time": here.status.start_time or format_time(here.now),
    }
    status = here.status.model_copy(update=update)
    status = here.mark(status, ConditionType.GANG_READY, False, picture.reason, message)
    return Plan(
        status=here.present(status, picture),
        events=(Event("StatusLost", message, warning=True),),
        again=timedelta(0),
    )
