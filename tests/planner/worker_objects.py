"""A worker's pod, and the parts of it that tests ask about, for a job given by its changes."""

from typing import Any

from tests.unit.jobs import resolved
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.objects.worker_env import shared_env
from tpu_training_operator.domain.objects.worker_pod import worker_pod

Object = dict[str, Any]


def pod(changes: Object | None = None, *, slice_index: int = 0, host: int = 2) -> Object:
    return worker_pod(*resolved(changes), WorkerId(3, slice_index, host))


def container(changes: Object | None = None, **worker: int) -> Object:
    containers: list[Object] = pod(changes, **worker)["spec"]["containers"]
    [only] = containers
    return only


def env(changes: Object | None = None, **worker: int) -> dict[str, str]:
    """The variables that have a plain value: those of all workers, and the worker's own."""
    own = {v["name"]: v["value"] for v in container(changes, **worker)["env"] if "value" in v}
    return shared_env(*resolved(changes), 3) | own
