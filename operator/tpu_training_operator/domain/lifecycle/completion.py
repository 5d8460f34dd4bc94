"""How a job ends: all workers succeeded, or a deadline is over."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason, is_true
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.actions import DeleteJob, Event, Plan
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture
from tpu_training_operator.domain.lifecycle.context import Situation
from tpu_training_operator.domain.lifecycle.goodput import active_seconds
from tpu_training_operator.domain.lifecycle.outcome import final_progress, final_words
from tpu_training_operator.domain.lifecycle.pod_cleanup import deletions, next_force
from tpu_training_operator.domain.observed import Object, Observed, WorkerPod, parse_time

_AT_ONCE = timedelta(0)
# A century; more could not be added to a date.
_LONGEST_TTL_SECONDS = 100 * 365 * 24 * 3600


def succeed(here: Situation) -> Plan:
    message = words_of_success(here.pods)
    picture = Picture(State.SUCCEEDED, Kind.SETTLED, Reason.ALL_WORKERS_SUCCEEDED, message)
    progress = final_progress(here.pods[0], here.resolution.recipe.train_steps, here.status.progress)
    status = replace(here.status, progress=progress or here.status.progress, goodput=here.goodput_at_end(here.now))
    if is_true(status.conditions, ConditionType.SUSPENDED):
        status = here.mark(status, ConditionType.SUSPENDED, False, picture.reason, message)
    status = here.mark(status, ConditionType.SUCCEEDED, True, picture.reason, message)
    return Plan(status=here.finish(status, picture), events=(Event("Succeeded", message),), again=_AT_ONCE)


def words_of_success(gang: Sequence[WorkerPod]) -> str:
    finished = "the worker has finished" if len(gang) == 1 else f"all {len(gang)} workers have finished"
    return f"{finished}{final_words(gang[0])}"


def active_time_left(here: Situation) -> timedelta | None:
    """Until `activeDeadlineSeconds` is over, if the job is active all the time; None without that deadline."""
    limit = here.job.spec.run_policy.active_deadline_seconds
    return None if limit is None else timedelta(seconds=limit - active_seconds(here.goodput()))


def exceed_deadline(here: Situation) -> Plan:
    limit = here.job.spec.run_policy.active_deadline_seconds
    message = f"active for {limit} s, which is all that spec.runPolicy.activeDeadlineSeconds allows"
    picture = Picture(State.FAILED, Kind.STUCK, Reason.DEADLINE_EXCEEDED, message)
    status = replace(here.status, goodput=here.goodput_at_end(here.now))
    status = here.mark(status, ConditionType.FAILED, True, picture.reason, message)
    return Plan(status=here.finish(status, picture), events=(Event("Failed", message, warning=True),), again=_AT_ONCE)


def after_the_end(observed: Observed, status: Status, now: datetime) -> Plan:
    """A finished job stops what still runs, and goes itself when its time is over."""
    running = [pod for pod in observed.pods if not pod.has_ended]
    ttl = _time_to_live(observed.job)
    left = None if ttl is None or status.completion_time is None else parse_time(status.completion_time) + ttl - now
    if left is not None and left <= _AT_ONCE:
        metadata = observed.job["metadata"]
        # With the status that it has: nothing can be noted in a job that is gone.
        return Plan(stages=((DeleteJob(metadata["name"], metadata["uid"]),),), status=status)
    waits = [wait for wait in (left, next_force(running, now)) if wait is not None]
    return Plan(stages=deletions(running, now), again=min(waits, default=None))


def may_need_a_pass(job: Object, now: datetime) -> bool:
    """Whether there may be anything to do about the job. Not about one that has finished: its last pass said when its
    time is over, and only if that was lost the time is over already."""
    status = Status.read(job.get("status"))
    if status.completion_time is None:
        return True
    ttl = _time_to_live(job)
    return ttl is not None and parse_time(status.completion_time) + ttl <= now


def _time_to_live(job: Object) -> timedelta | None:
    """From the spec as it stands: a finished job's spec may be one that this operator would refuse."""
    policy = job.get("spec", {}).get("runPolicy") or {}
    given = policy.get("ttlSecondsAfterFinished")
    return timedelta(seconds=max(0, min(given, _LONGEST_TTL_SECONDS))) if isinstance(given, int) else None
