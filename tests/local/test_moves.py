"""A job moves on this machine as in a cluster: `--simulate-loss` takes a slice away for a while."""

from tests.local.runs import Runs

SMALLER = {"slice": {"acceleratorType": "v5litepod-8"}, "waitForPreviousSeconds": 1}
WAITS_ON_FOUR_HOSTS = """
tell("ready", os.environ["TPUJOB_NUM_HOSTS"])
if os.environ["TPUJOB_NUM_HOSTS"] == "4":
    wait_forever()
"""


def test_a_job_that_loses_its_slice_goes_on_with_the_next_one(runs: Runs) -> None:
    arguments = ["--output-dir", "out", "--simulate-loss", "v5litepod-16:5-"]
    run = runs.start(WAITS_ON_FOUR_HOSTS, {"placement.alternatives": [SMALLER]}, hosts=4, arguments=arguments)
    assert run.wait() == 0
    result = run.result()
    assert [(move["from"], move["to"], move["reason"]) for move in result["moves"]][-1][:2] == (0, 1)
    assert run.surviving_processes() == []


def test_a_job_that_loses_one_of_its_slices_goes_on_with_the_other(runs: Runs) -> None:
    arguments = ["--output-dir", "out", "--simulate-loss", "v5litepod-8:5-"]
    changes = {
        "placement.count": {"min": 1, "waitForPreviousSeconds": 1},
        "slice.acceleratorType": "v5litepod-8",
        "slice.count": 2,
    }
    run = runs.start(WAITS_ON_FOUR_HOSTS, changes, hosts=4, arguments=arguments)
    assert run.wait() == 0
    move = run.result()["moves"][-1]
    assert (move["from"], move["to"]) == (0, 1)
    assert "1 of 2 slices have theirs" in move["why"]
    assert run.surviving_processes() == []


def test_a_slice_that_the_job_does_not_have_cannot_be_lost(runs: Runs) -> None:
    run = runs.start("", hosts=4, arguments=["--output-dir", "out", "--simulate-loss", "v5p-8:5-10"])
    assert run.wait() == 2
    assert "does not run on 'v5p-8'; its" in run.stderr
