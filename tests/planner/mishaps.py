"""What can go wrong with a gang and its operators, by name, and how often it happened in the state machine."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from hypothesis import event

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import ApiError, Conflict, Forbidden, InvalidRequest, Unavailable

# How often each really happened, over all examples.
FIRED: Counter[str] = Counter()


def fired(what: str) -> None:
    FIRED[what] += 1
    event(what)


Mishap = Callable[[ModelCluster, Object], None]

# One code of each kind that the planner treats differently; `tests.unit.failures.test_failure_table` covers all.
ENDINGS: dict[str, Mishap] = {
    **{f"exit code {code}": partial(kubelet.end, code=code) for code in (0, 1, 3, 65, 69, 71, 75, 77, 137)},
    "exit code 137, the pod's end untold": partial(kubelet.leave, code=137),
    "a host unfit": kubelet.find_host_unfit,
    "a slice unfit": kubelet.find_slice_unfit,
    "exit without a message": partial(kubelet.end, code=0, message=""),
    "out of memory": partial(kubelet.end, code=137, reason="OOMKilled"),
}
STARTS: dict[str, Mishap] = {
    "placed": kubelet.place,
    "with an address": kubelet.give_address,
    "started": kubelet.start,
    "refused": kubelet.refuse,
    "no image": kubelet.find_no_image,
}
LOSSES: dict[str, Mishap] = {
    "deleted by hand": kubelet.delete_by_hand,
    "vanished": kubelet.vanish,
    "node shut down": kubelet.shut_down,
    "node lost": kubelet.lose_node,
    "node tainted": kubelet.taint_node,
    "node known to be lost": kubelet.lose_node_for_good,
}

TROUBLES: dict[str, tuple[ApiError, bool]] = {
    "429": (Unavailable(429, "TooManyRequests", "later"), False),
    "500": (Unavailable(500, "InternalError", "no"), False),
    "500, and yet it was done": (Unavailable(500, "InternalError", "timeout"), True),
    "no answer, and yet it was done": (Unavailable(0, "", "reset by peer"), True),
    "403": (Forbidden(403, "Forbidden", "exceeded quota"), False),
    "422": (InvalidRequest(422, "Invalid", "denied by a webhook"), False),
    "409": (Conflict(409, "Conflict", "the object has been modified"), False),
}

# What must also have happened: a run that makes no progress would look like one in which nothing breaks.
ENDS = [
    *(
        "Succeeded",
        "Failed",
        "DeadlineExceeded",
        "RestartLimitReached",
        "NotRetryable",
        "BudgetExceeded",
        "a release",
        "a resumption",
        "a refill",
    ),
    *("a restart for a hang", "stacks asked for", "a deletion by force", "a node avoided", "a job whose time is over"),
    "an unfit host avoided",
    *("a crash amid a pass", "a stale pass", "a stale pass that conflicts", "the clock set back", "a job deleted"),
    *("a gang that runs", "a pass on old news", "a job applied again", "a blocked job", "chips busy", "nodes back"),
]
