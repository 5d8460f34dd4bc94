"""One small job on real nodes, in its own namespace, long enough to be hurt in the middle.

It runs on two hosts: a slowed task (`paced`) with checkpoints in a bucket, or with `OWN_LOOP` a loop without torch.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.processes import wait_until
from tests.e2e import paced
from tests.e2e.chronicle import Chronicle
from tests.e2e.space import RESTRICTED, Space

Losses = dict[int, float]

NAME = "digits"
BUCKET = "checkpoints"
HOSTS = 2
STEPS = 120
# A checkpoint costs a worker what a hundred steps do.
STEPS_BETWEEN_CHECKPOINTS = 30
# Waiting limits, not expectations: many trainings share a small machine.
RUN_SECONDS = 600.0
START_SECONDS = 300.0

# Fields that make it a job with its own loop.
OWN_LOOP: Object = {
    "trainer": {"entrypoint": None, "command": ["python3", "-m", "tests.e2e.own_loop"]},
    "checkpoint": None,
    "report": None,
}


def body(storage: ObjectStorage, folder: str, pace: float, env: dict[str, str], **spec: Any) -> Object:
    """The job. `pace`: seconds added to each step of the first attempt. `env`: additional variables for `paced` or the
    trainer. `spec`: fields to replace, of the trainer and the checkpoint each one; None leaves a field out."""
    variables = {**storage.environment, paced.STEP_SECONDS: str(pace), **env}
    trainer = {
        "image": "localhost/tpu-examples:1",
        "entrypoint": "tests.e2e.paced:task",
        "backend": "Torch",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "terminationGracePeriodSeconds": 10,
        **spec.pop("trainer", {}),
    }
    saving = spec.pop("checkpoint", {})
    usual = {"uri": f"gs://{BUCKET}/{folder}", "everySteps": STEPS_BETWEEN_CHECKPOINTS, "keep": 2}
    fields = {
        "slice": {"acceleratorType": "v5litepod-8", "hardware": "CPU"},
        "trainer": _set(trainer),
        "recipe": {
            "tunedOn": {"acceleratorType": "v5litepod-8"},
            "globalBatchSize": 64,
            "trainSteps": STEPS,
            "optimizer": {"name": "sgd", "learningRate": 0.1, "momentum": 0.9},
        },
        "checkpoint": None if saving is None else usual | saving,
        "report": {"uri": f"gs://{BUCKET}/{folder}/report"},
        **spec,
    }
    return {
        "apiVersion": "tpu-operator.dev/v1alpha1",
        "kind": "TPUTrainingJob",
        "metadata": {"name": NAME},
        "spec": _set(fields),
    }


def _set(fields: Object) -> Object:
    return {name: value for name, value in fields.items() if value is not None}


class Training(Space):
    """`chronicle`: everything that the API server reported about it. `started` makes it."""

    def __init__(self, cluster: Cluster, name: str, storage: ObjectStorage, chronicle: Chronicle) -> None:
        super().__init__(cluster, name)
        self.chronicle = chronicle
        self._storage = storage

    def pod(self, host: int, attempt: int = 1) -> Object:
        """A worker whose container is running; waits for the first one."""
        name = f"{NAME}-{attempt}-0-{host}"
        return self.chronicle.wait(
            lambda told: _with_container(told.pods().get(name)), timeout=START_SECONDS, what=name
        )

    def checkpoint(self) -> int:
        """The step of this training's newest complete checkpoint, or 0."""
        names = self._storage.names(BUCKET, f"{self.name}/{self.name}/{NAME}/step-")
        return max((int(name.split("/step-")[1][:8]) for name in names if name.endswith("/COMMIT")), default=0)

    def losses(self) -> Losses:
        """By step, as the trainer has recorded them."""
        history = json.loads(self._storage.read(BUCKET, f"{self.name}/report/history.json"))
        return {point["step"]: point["mean"] for point in history["recorded"]["losses"]}

    def wait_attempt(self, attempt: int = 1) -> None:
        """Waits until all workers of the attempt have been ready."""
        self.chronicle.wait(
            lambda told: any(_running(status, attempt) for status in told.statuses()) or None,
            timeout=START_SECONDS,
            what=f"attempt {attempt} runs",
        )

    def wait_checkpoint(self, after: int = 0) -> int:
        """Waits for a checkpoint of a later step than `after`; returns its step."""
        wait_until(lambda: self.checkpoint() > after, timeout=START_SECONDS, what=f"a checkpoint after step {after}")
        return self.checkpoint()

    def wait_steps_reported(self) -> None:
        """Waits until the status says that it trains: before that it may pause for long while programs compile."""
        self.chronicle.wait(
            lambda told: (told.status().get("progress") or {}).get("phase") == "Training" or None,
            timeout=START_SECONDS,
            what="steps are reported",
        )

    def wait_start_told(self, attempt: int) -> None:
        """Waits until the status says where all the time of the attempt's start went."""
        self.chronicle.wait(
            lambda told: (
                any(
                    start["attempt"] == attempt and "totalSeconds" in start for start in told.status().get("starts", [])
                )
                or None
            ),
            timeout=START_SECONDS,
            what=f"the start of attempt {attempt} is told",
        )

    def wait_ended(self) -> Object:
        """Waits for its end; returns its last status."""
        return self.chronicle.wait(
            lambda told: told.status() if told.status().get("state") in ("Succeeded", "Failed") else None,
            timeout=RUN_SECONDS,
            what="the training has ended",
        )

    def log(self, attempt: int, host: int = 0) -> str:
        return self.kubectl("logs", f"{NAME}-{attempt}-0-{host}")


@contextmanager
def started(
    cluster: Cluster,
    storage: ObjectStorage,
    pace: float = 0.0,
    env: dict[str, str] | None = None,
    **spec: Any,
) -> Iterator[Training]:
    """Applies a training; for the arguments see `body`."""
    with fresh_namespace(cluster.api, RESTRICTED) as name, Chronicle(cluster.api, name) as chronicle:
        training = Training(cluster, name, storage, chronicle)
        training.kubectl("apply", "-f", "-", input=yaml.safe_dump(body(storage, name, pace, env or {}, **spec)))
        yield training


def result(status: Object) -> Object:
    """The result of the training, without its speed."""
    progress = status.get("progress") or {}
    return {name: progress.get(name) for name in ("step", "totalSteps", "loss", "metrics")}


def _with_container(pod: Object | None) -> Object | None:
    statuses = pod["status"].get("containerStatuses", []) if pod else []
    return pod if any("running" in status["state"] for status in statuses) else None


def _running(status: Object, attempt: int) -> bool:
    return status.get("attempt") == attempt and status.get("state") == "Running"
