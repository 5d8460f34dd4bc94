"""Reports in a local run take the same path as in a cluster: TLS, token, inbox, status, hang detection."""

from tests.local.runs import REPORTER, Runs

QUICK_RESTARTS = {"runPolicy.restart.backoff": {"initialSeconds": 1, "maxSeconds": 1}}

HANGS_TWICE = (
    REPORTER
    + """
if ATTEMPT == 1:
    wait_forever()
while ATTEMPT == 2:
    wants_stacks = report(7, loss=0.5, warnings=["slow"], checkpointStep=5)
    if wants_stacks:
        report(7, stacks="Thread 1: in all_reduce")
    time.sleep(1)
report(300, phase="Done", loss=float("nan"), checkpointStep=300) if HOST == 0 else None
"""
)


def test_a_hung_loop_is_restarted_and_shows_its_stacks_if_it_reports(
    runs: Runs,
) -> None:
    run = runs.start(HANGS_TWICE, {"runPolicy.progressDeadlineSeconds": 2, **QUICK_RESTARTS})
    assert run.wait() == 0, run.stdout + run.stderr
    result = run.result()
    assert (result["attempts"], result["restarts"]) == (3, {"Hang": 2})
    failure = result["failure"]
    assert (failure["attempt"], failure["class"], failure["reason"]) == (2, "Hang", "NoProgress")
    assert failure["message"].startswith("no step was reported for 2 s,")
    assert "step 7 of 300" in failure["message"]
    assert failure["message"].endswith("Thread 1: in all_reduce")
    assert {"step": 7, "loss": 0.5} in result["lossCurve"]
    assert result["warnings"] == ["slow"]
    first, *restarts = result["starts"]
    assert (first["attempt"], first["cause"]) == (1, "WaitingForWorkers")
    assert [start["cause"] for start in restarts] == ["Hang", "Hang"]
    # The first attempt reported no step, so it has no first one.
    assert "totalSeconds" not in first
    for start in restarts:
        assert start["seconds"]["backoff"] >= 0
        assert sum(start["seconds"].values()) == start["totalSeconds"]


def test_reports_bypass_the_shells_proxy(runs: Runs) -> None:
    script = REPORTER + "tell('answer', report(1, phase='Starting'))"
    nowhere = "http://127.0.0.1:9"
    run = runs.start(script, environ={"https_proxy": nowhere, "HTTPS_PROXY": nowhere, "no_proxy": "example.com"})
    assert run.wait() == 0
    assert "not reported" not in (run.out / "pods" / "digits-1-0-0" / "log.txt").read_text()
