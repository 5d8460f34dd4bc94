"""The entry check on real nodes stops a job with a typo. What it lets through, `test_ladder` shows."""

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.e2e.together import Story
from tests.e2e.training import NAME, Training, started
from tests.stories import Stories

REQUIRED = {"entryCheck": {"mode": "Require"}}
CHECK = f"{NAME}-entry-check"


def condition(status: Object, kind: str) -> tuple[str, str]:
    return next((each["status"], each["reason"]) for each in status["conditions"] if each["type"] == kind)


def pods(training: Training) -> list[str]:
    return training.kubectl("get", "pods", "--output", "name").split()


def a_typo(cluster: Cluster, storage: ObjectStorage) -> None:
    wrong = {"entrypoint": "tests.e2e.paced:taks"}
    with started(cluster, storage, trainer=wrong, **REQUIRED) as training:
        status = training.wait_ended()
        assert condition(status, "Failed") == ("True", "EntryFailed")
        assert status["lastFailure"]["class"] == "UserError"
        assert "taks" in status["lastFailure"]["message"]
        assert pods(training) == [f"pod/{CHECK}"]
        assert "taks" in training.kubectl("logs", CHECK)


STORIES = {"typo": Story(a_typo, trains=True)}


def test_a_typo_ends_the_job_before_there_is_a_worker(stories: Stories) -> None:
    stories.end_of("typo")
