"""A ladder on real nodes: a job that passes its entry check goes up it, and one whose loss does not fall stops at the
lower rung and leaves nothing running."""

import re

import pytest

from tests.e2e.ladder import ASCENDING, LEARNS, STORIES, TRIED, Ascent
from tests.e2e.training import HOSTS, NAME, STEPS
from tests.stories import Stories

CHECK = f"{NAME}-entry-check"


@pytest.fixture(scope="module")
def ascents(stories: Stories) -> dict[str, Ascent]:
    return {name: stories.end_of(name) for name in STORIES}


def test_the_entry_check_comes_before_the_rung(ascents: dict[str, Ascent]) -> None:
    status, told = ascents[LEARNS].status, ascents[LEARNS].told
    [checked] = [one for one in status["conditions"] if one["type"] == "EntryCheckPassed"]
    assert (checked["status"], checked["reason"]) == ("True", "EntryPassed")
    created = {moment.name: moment.item["metadata"]["creationTimestamp"] for moment in told.moments() if moment.is_pod}
    assert created[CHECK] == min(created.values())


def test_a_job_that_passes_goes_up(ascents: dict[str, Ascent]) -> None:
    status, told = ascents[LEARNS].status, ascents[LEARNS].told
    assert status["state"] == "Succeeded", told.summary()
    assert [
        (rung["slice"], rung["globalBatchSize"], rung["steps"], rung["verdict"]) for rung in status["ladder"]["rungs"]
    ] == [
        ("v5litepod-4", 32, TRIED, "Passed"),
        ("v5litepod-8", 64, STEPS, "Passed"),
    ]
    assert ((status["ladder"]["rung"], status["ladder"]["of"]), status["progress"]["step"], told.attempts()) == (
        (2, 2),
        STEPS,
        [1, 2],
    )
    job = [f"{NAME}-2-0-{host}" for host in range(HOSTS)]
    assert told.created() == [f"{NAME}-1-0-0", *job, CHECK]
    # The worker of the rung has left before those of the job come; the check's pod stays for its log.
    assert ascents[LEARNS].pods == dict.fromkeys([*job, CHECK], "Succeeded")


def test_one_whose_loss_does_not_fall_stops_at_the_lower_rung_says_so_in_numbers_and_leaves_nothing_running(
    ascents: dict[str, Ascent],
) -> None:
    status, told = ascents[ASCENDING].status, ascents[ASCENDING].told
    [failed] = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert (status["state"], failed["reason"], (status["ladder"]["rung"], status["ladder"]["of"])) == (
        "Failed",
        "GateFailed",
        (1, 2),
    )
    falls = r"lossFalls failed: the loss did not fall from \d\S* .*to \d\S* .*: -\d\S* .*\)"
    why = rf"rung 1 of 2 on v5litepod-4: {falls}; evaluation failed: accuracy \S+, at least 0.2 required"
    assert re.fullmatch(why, failed["message"]), failed["message"]
    [rung] = status["ladder"]["rungs"]
    assert (rung["verdict"], float(rung["firstLoss"]) < float(rung["lastLoss"])) == ("Failed", True)
    # The pod has ended, and is kept for its log.
    assert (told.created(), ascents[ASCENDING].pods) == ([f"{NAME}-1-0-0"], {f"{NAME}-1-0-0": "Succeeded"})
    assert status["goodput"]["chipSeconds"]["held"] == 0
    assert not (status.get("restarts") or {}).get("byClass")
