"""A ladder of three rungs on real nodes: a job that passes its entry check goes up it, and one whose loss does not fall
stops at the first rung and leaves nothing running."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.e2e.chronicle import Chronicle
from tests.e2e.paced import ASCENDS
from tests.e2e.together import Story
from tests.e2e.training import HOSTS, NAME, started
from tests.stories import Stories

CHECK = f"{NAME}-entry-check"
STEPS = 60
TRIED = 40
LADDER: dict[str, Any] = {
    "ladder": {
        "rungs": [
            {"slice": {"acceleratorType": "v5litepod-1", "hardware": "CPU"}, "steps": TRIED},
            {
                "slice": {"acceleratorType": "v5litepod-4", "hardware": "CPU"},
                "steps": TRIED,
                "gates": {"minEfficiency": 0.001, "evaluation": {"metric": "accuracy", "min": 0.2}},
            },
        ]
    },
    "recipe": {
        "tunedOn": {"acceleratorType": "v5litepod-8"},
        "globalBatchSize": 64,
        "trainSteps": STEPS,
        "optimizer": {"name": "sgd", "learningRate": 0.1, "momentum": 0.9},
    },
}


@dataclass(frozen=True)
class Ascent:
    """What became of a job. `pods`: at its end, name and phase."""

    status: Object
    told: Chronicle
    pods: dict[str, str]


def ascend(env: dict[str, str], entry: str, cluster: Cluster, storage: ObjectStorage) -> Ascent:
    with started(cluster, storage, env=env, entryCheck={"mode": entry}, **LADDER) as training:
        status = training.wait_ended()
        pods = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in training.pods()}
        return Ascent(status, training.chronicle, pods)


# Of a task that learns, and of one that follows its gradient upwards.
STORIES = {
    "learns": Story(partial(ascend, {}, "Require"), trains=True),
    "ascends": Story(partial(ascend, {ASCENDS: "1"}, "Skip"), trains=True),
}


@pytest.fixture(scope="module")
def ascents(stories: Stories) -> dict[str, Ascent]:
    return {name: stories.end_of(name) for name in STORIES}


def test_the_entry_check_comes_before_the_first_rung(ascents: dict[str, Ascent]) -> None:
    status, told = ascents["learns"].status, ascents["learns"].told
    [checked] = [one for one in status["conditions"] if one["type"] == "EntryCheckPassed"]
    assert (checked["status"], checked["reason"]) == ("True", "EntryPassed")
    created = {moment.name: moment.item["metadata"]["creationTimestamp"] for moment in told.moments() if moment.is_pod}
    assert created[CHECK] == min(created.values())


def test_a_job_that_passes_goes_up_every_rung(ascents: dict[str, Ascent]) -> None:
    status, told = ascents["learns"].status, ascents["learns"].told
    assert status["state"] == "Succeeded", told.summary()
    assert [
        (rung["slice"], rung["globalBatchSize"], rung["steps"], rung["verdict"]) for rung in status["ladder"]["rungs"]
    ] == [
        ("v5litepod-1", 8, TRIED, "Passed"),
        ("v5litepod-4", 32, TRIED, "Passed"),
        ("v5litepod-8", 64, STEPS, "Passed"),
    ]
    assert ((status["ladder"]["rung"], status["ladder"]["of"]), status["progress"]["step"], told.attempts()) == (
        (3, 3),
        STEPS,
        [1, 2, 3],
    )
    lower_rungs, job = [f"{NAME}-1-0-0", f"{NAME}-2-0-0"], [f"{NAME}-3-0-{host}" for host in range(HOSTS)]
    assert told.created() == [*lower_rungs, *job, CHECK]
    # The workers of a rung have left before those of the next one come; the check's pod stays for its log.
    assert ascents["learns"].pods == dict.fromkeys([*job, CHECK], "Succeeded")


def test_one_whose_loss_does_not_fall_stops_at_the_first_rung_says_so_in_numbers_and_leaves_nothing_running(
    ascents: dict[str, Ascent],
) -> None:
    status, told = ascents["ascends"].status, ascents["ascends"].told
    [failed] = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert (status["state"], failed["reason"], (status["ladder"]["rung"], status["ladder"]["of"])) == (
        "Failed",
        "GateFailed",
        (1, 3),
    )
    why = r"rung 1 of 3 on v5litepod-1: lossFalls failed: the loss did not fall from \d\S* .*to \d\S* .*: -\d\S* .*\)"
    assert re.fullmatch(why, failed["message"]), failed["message"]
    [rung] = status["ladder"]["rungs"]
    assert (rung["verdict"], float(rung["firstLoss"]) < float(rung["lastLoss"])) == ("Failed", True)
    # The pod has ended, and is kept for its log.
    assert (told.created(), ascents["ascends"].pods) == ([f"{NAME}-1-0-0"], {f"{NAME}-1-0-0": "Succeeded"})
    assert status["goodput"]["chipSeconds"]["held"] == 0
    assert not (status.get("restarts") or {}).get("byClass")
