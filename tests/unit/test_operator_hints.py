"""Which objects that the operator watches make it look at a job."""

from typing import Any, cast

import pytest

from tpu_training_operator.api import constants
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.credentials import Credentials
from tpu_training_operator.main import Operator, Options
from tpu_training_operator.runtime.controller import Controller

OWNER = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "name": "digits", "uid": "1", "controller": True}


class Hints:
    def __init__(self) -> None:
        self.keys: list[JobKey] = []

    def enqueue(self, key: JobKey, **_: Any) -> None:
        self.keys.append(key)


@pytest.mark.parametrize(
    ("owners", "is_hint"),
    [
        ([OWNER], True),
        ([{**OWNER, "apiVersion": f"{constants.GROUP}/v1"}], True),
        ([], False),
        ([{**OWNER, "name": "another"}], False),
        ([{**OWNER, "controller": False}], False),
        ([{**OWNER, "kind": "Job"}], False),
        ([{**OWNER, "apiVersion": "batch/v1"}], False),
    ],
    ids=[
        "its job's",
        "of a later version",
        "nobody's",
        "another job's",
        "not controlled",
        "a Job's",
        "another group's",
    ],
)
async def test_a_pod_event_enqueues_the_job_that_controls_the_pod(owners: list[dict[str, Any]], is_hint: bool) -> None:
    operator = Operator(cast("Credentials", None), cast("Options", None))
    hints = Hints()
    operator._controller = cast("Controller", hints)
    labels = {constants.LABEL_JOB_NAME: "digits"}
    body = {"metadata": {"labels": labels, "ownerReferences": owners}}
    await operator._pod_event(namespace="team", labels=labels, body=body, event={"type": "MODIFIED"}, type="MODIFIED")
    assert hints.keys == ([JobKey("team", "digits")] if is_hint else [])
