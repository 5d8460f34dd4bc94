"""What a person should do next about a job: by its state, and by the class of its last failure. Pure.

docs/failures.md has the long form. Used by `tpujob status`.
"""

from tpu_training_operator.api.conditions import ConditionType, Reason, find
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Activity, State
from tpu_training_operator.cli.job_view import JobView

FAILURES = "docs/failures.md"
PROGRESS = "docs/progress.md"

_AFTER_FAILURE = {
    FailureClass.USER_ERROR: "correct the code or the job, then delete it and create it anew.",
    FailureClass.INFRASTRUCTURE: "see whether it is the same node every time (kubectl describe node), and have it"
    " repaired; then create the job anew: with spec.checkpoint it goes on where it was.",
    FailureClass.PREEMPTION: "its limit is yours: -1 in spec.runPolicy.restart.limits.Preemption is without limit.",
    FailureClass.OUT_OF_MEMORY: "give the workers more memory (spec.trainer.resources), or use less of it: a smaller"
    " batch, fewer data loader processes.",
    FailureClass.HANG: "the worker's log has the stack of every thread; a collective that not every host reaches is the"
    " usual cause.",
    FailureClass.NOT_FINITE: "lower the learning rate, warm up for longer, or look at the data of the step that the"
    " message names; then create the job again.",
    FailureClass.UNKNOWN: "the worker's log is the place to look.",
}
_WHILE_IT_LIVES = {
    FailureClass.USER_ERROR: "its cause is in your code: it will come back.",
    FailureClass.NOT_FINITE: "the same steps will end the same way, unless the recipe or the data change.",
    FailureClass.OUT_OF_MEMORY: "it will come back unless the workers get more memory (spec.trainer.resources).",
    FailureClass.HANG: "if it comes back, compare the stacks in the workers' logs.",
}


def advice(view: JobView, command: str) -> list[str]:
    """Sentences; empty where there is nothing to do. `command`: how `tpujob` is called here."""
    match view.state:
        case None if not view.state_word:
            return [
                "No operator has looked at this job yet. Does one run, and does it serve this namespace?"
                " kubectl get deployments -A -l app.kubernetes.io/name=tpu-training-operator"
            ]
        case State.INVALID:
            return ["Correct what the message names, then delete the job and create it anew: a spec cannot be changed."]
        case State.BLOCKED:
            return ["Remove what the message names; the operator tries again every 30 s."]
        case State.SUSPENDED:
            resume = """-p '{"spec":{"runPolicy":{"suspend":false}}}'"""
            return [f"To go on: kubectl patch tpujob {view.name} -n {view.namespace} --type=merge {resume}"]
        case State.FAILED:
            return _after_failure(view, command)
        case State.SUCCEEDED:
            return []
        case State.RUNNING if view.progress is None and view.has_own_loop:
            return [f"A loop of your own shows its steps here when it reports them: {PROGRESS}."]
        case _:
            return [*_waiting(view), *_while_it_lives(view)]


def _after_failure(view: JobView, command: str) -> list[str]:
    failed, failure = find(view.status.conditions, ConditionType.FAILED), view.failure
    if failed is not None and failed.reason == Reason.DEADLINE_EXCEEDED:
        return [
            "Its time was over: a new job with a longer spec.runPolicy.activeDeadlineSeconds goes on from the"
            " newest checkpoint."
        ]
    if failure is None:
        return []
    log = f"{command} logs {view.name} -n {view.namespace} --failed"
    link = f"{FAILURES}#{failure.failure_class.lower()}"
    return [f"After {failure.failure_class}: {_AFTER_FAILURE[failure.failure_class]} See {link}.", f"Its log: {log}"]


def _while_it_lives(view: JobView) -> list[str]:
    failure = view.failure
    if failure is None or failure.failure_class not in _WHILE_IT_LIVES:
        return []
    link = f"{FAILURES}#{failure.failure_class.lower()}"
    return [f"After {failure.failure_class}: {_WHILE_IT_LIVES[failure.failure_class]} See {link}."]


def _waiting(view: JobView) -> list[str]:
    """A gang that waits for nodes: the scheduler knows why."""
    waits = view.goodput is not None and view.goodput.activity is Activity.QUEUE
    unscheduled = [group for group in view.hosts.others if group.is_unscheduled] if view.hosts else []
    if not waits or not unscheduled:
        return []
    pod = unscheduled[0].workers[0].pod_name(view.name)
    return [f"It waits for nodes; the scheduler's and the autoscaler's words: kubectl describe pod {pod}"]
