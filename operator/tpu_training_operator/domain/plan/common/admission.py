"""The condition Admitted of a job in a queue: whether its attempt may have workers (see `queueing`)."""

from dataclasses import replace

from tpu_training_operator.api.conditions import ConditionType, Reason, find, without_condition
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.workload import Queue
from tpu_training_operator.domain.job.options import Option
from tpu_training_operator.domain.plan.common.context import Context


def record_admission(ctx: Context, status: Status, option: Option, message: str) -> Status:
    """Returns the status that begins an attempt on that slice. Until the Workload of the slice is admitted, the attempt
    waits without workers. `message`: why it waits."""
    queue = ctx.queue_on(option)
    if queue is None:
        return replace(status, conditions=without_condition(status.conditions, ConditionType.ADMITTED))
    if queue.workload is None or not queue.workload.is_admitted:
        return ctx.with_condition(status, ConditionType.ADMITTED, False, Reason.QUEUED, message)
    return ctx.with_condition(status, ConditionType.ADMITTED, True, Reason.ADMITTED, describe_admission(queue))


def is_queued(status: Status) -> bool:
    """Whether the status says that the job waits for its admission."""
    admitted = find(status.conditions, ConditionType.ADMITTED)
    return admitted is not None and not admitted.is_true


def describe_admission(queue: Queue) -> str:
    workload = queue.workload
    if workload is None:
        return ""
    flavors = f" with {', '.join(workload.flavors)}" if workload.flavors else ""
    return f"admitted by ClusterQueue {workload.cluster_queue}{flavors}"
