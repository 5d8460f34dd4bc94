"""What is shown of a job at each stage of its life, word for word: by `tpujob watch` and by `tpujob status`."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.pods import NOON, deleted, ended, pod, ready, time_at, with_status
from tests.unit.seen_jobs import JOBS, Object, goodput, large, progress, running_pods, seen_job, view_of, waiting
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.cli.advice import advice
from tpu_training_operator.cli.job_report import as_json, report_rows
from tpu_training_operator.cli.job_rows import Row, headline, live_rows, plain_rows, state_style
from tpu_training_operator.cli.job_table import table_row
from tpu_training_operator.cli.job_view import JobView, job_view
from tpu_training_operator.cli.screen import screen
from tpu_training_operator.cli.words import duration
from tpu_training_operator.domain.hosts import host_of

ROOT = Path(__file__).parents[2]


def drawn(view: JobView, rows: list[Row], width: int = 80, note: str | None = None) -> str:
    """The lines on a screen of that width, without the blanks at their ends."""
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(screen(headline(view), state_style(view), rows, note))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


LIVE = {
    "not seen": "digits: not seen by an operator yet",
    "starting": """\
digits: Starting, attempt 1, v5litepod-16
 why        attempt 1: waiting for 4 workers on v5litepod-16 to become ready
 hosts      1/4 ready
            2 hosts: no node: 0/4 nodes are available: 4 Insufficient
            google.com/tpu. (0/2, 0/3)
            1 host: ContainerCreating (0/1 on node-1)
 time       queue 10m00s""",
    "running": """\
digits: Running, attempt 1, v5litepod-16
 hosts      4/4 ready
 step       150/300 ━━━━━━━━━━━━━━━─────────────── 50 %, training
 speed      3879.5 examples/s, loss 0.0150698, about 2m10s left
 checkpoint step 140
 reported   4s ago
 time       queue 3m20s, start 40s, productive 6m00s; goodput 0.600""",
    "no reports": """\
digits: Running, attempt 1, v5litepod-16
 hosts      4/4 ready
 step       nothing reported yet
 time       queue 8m20s, start 1m40s""",
    "hung": """\
digits: Running, attempt 1, v5litepod-16
 hosts      4/4 ready
 step       150/300 ━━━━━━━━━━━━━━━─────────────── 50 %, training
 speed      3879.5 examples/s, loss 0.0150698, about 2m10s left
 checkpoint step 140
 reported   4s ago, but no further for 6m40s
 time       queue 3m20s, start 40s, productive 6m00s; goodput 0.600
 warning    host 3 is 2.1 times slower than the others""",
    "restarting": """\
digits: Restarting, attempt 3, v5litepod-16
 why        attempt 3 starts now: slice 0 host 2 (digits-2-0-2 on node-1) failed
            with Infrastructure (Killed, exit code 137)
 next       attempt 3 in 7s
 hosts      0/4 ready
            4 hosts: no pod yet (0/0, 0/1, 0/2, 0/3)
            1 worker of earlier attempts not gone yet
 step       150/300 ━━━━━━━━━━━━━━━─────────────── 50 %
 checkpoint step 140
 restarts   Infrastructure 2 (18 left), Preemption 1
 failure    Infrastructure (Killed, exit code 137): slice 0 host 2 on node-1,
            attempt 2, 4m00s ago
            the worker was killed (exit code 137)
 time       queue 2m30s, start 40s, productive 5m00s, wasted 20s, recovery
            1m30s; goodput 0.500""",
    "suspended": """\
digits: Suspended, attempt 1, v5litepod-16
 why        suspended by spec.runPolicy.suspend; no workers are running
 step       150/300 ━━━━━━━━━━━━━━━─────────────── 50 %
 checkpoint step 140
 time       queue 3m20s, start 40s, productive 5m00s, suspended 1m00s; goodput
            0.556""",
    "blocked": """\
digits: Blocked, attempt 1, v5litepod-16
 why        Service digits exists and belongs to somebody else; delete it or
            rename the job
 hosts      0/4 ready
            4 hosts: no pod yet (0/0, 0/1, 0/2, 0/3)""",
    "failed": """\
digits: Failed, attempt 1, v5litepod-16
 why        slice 0 host 2 (digits-1-0-2 on node-1) failed with UserError (exit
            code 1); the restart limit for UserError is 0
 failure    UserError (exit code 1): slice 0 host 2 on node-1, attempt 1, 4m00s
            ago
            FileNotFoundError: [Errno 2] No such file or directory:
            '/data/digits.npz' (digits.py:41)
 time       queue 8m50s, start 40s""",
    "succeeded": """\
digits: Succeeded, attempt 1, v5litepod-16
 step       300/300 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100 %
 speed      3879.5 examples/s, loss 0.0150698
 metrics    loss 0.0150698, accuracy 0.972222
 checkpoint step 300
 time       queue 30s, start 40s, productive 8m20s; goodput 0.877""",
}


@pytest.mark.parametrize("stage", JOBS)
def test_the_live_table(stage: str) -> None:
    job, pods = JOBS[stage]
    view = view_of(job, *pods)
    assert drawn(view, live_rows(view)) == LIVE[stage]


REPORTS = {
    "restarting": """\
digits: Restarting, attempt 3, v5litepod-16
 why        attempt 3 starts now: slice 0 host 2 (digits-2-0-2 on node-1) failed with Infrastructure (Killed, exit code
            137)
 slice      v5litepod-16 (4x4): 4 hosts, 16 chips, 16 replicas
 recipe     global batch 128, 8 per replica; 300 steps; learning rate 0.1
 hosts      0/4 ready
            4 hosts: no pod yet (0/0, 0/1, 0/2, 0/3)
            1 worker of earlier attempts not gone yet
 step       150/300 (50 %)
 checkpoint step 140
 failure    Infrastructure (Killed, exit code 137): slice 0 host 2 on node-1, pod digits-2-0-2, 4m00s ago, attempt 2
            the worker was killed (exit code 137)
            The gang was restarted as attempt 3.
 first one  Preemption (NodeShutdown): slice 0 host 2 on node-1, pod digits-1-0-2, 4m00s ago, attempt 1
            the node is shutting down
            The gang was restarted as attempt 2.
 restarts   Infrastructure    2   18 of 20 left (2 count: within 24h, no checkpoint since)
            Preemption        1   no limit
 faults     of chips on node-1 (4m00s ago)
 avoided    node-1
 time       queue         2m30s  25 %
            start           40s   7 %
            productive    5m00s  50 %
            wasted          20s   3 %
            recovery      1m30s  15 %   <- now
            together     10m00s   since 2026-01-15 11:50:00 UTC
            goodput       0.500   productive, of all that was not suspended""",
    "failed": """\
digits: Failed, attempt 1, v5litepod-16
 why        slice 0 host 2 (digits-1-0-2 on node-1) failed with UserError (exit code 1); the restart limit for UserError
            is 0
 slice      v5litepod-16 (4x4): 4 hosts, 16 chips, 16 replicas
 recipe     global batch 128, 8 per replica; 300 steps; learning rate 0.1
 failure    UserError (exit code 1): slice 0 host 2 on node-1, pod digits-1-0-2, 4m00s ago, attempt 1
            Traceback (most recent call last):
              File "/app/digits.py", line 41, in task
                data = load(hp.path)
            FileNotFoundError: [Errno 2] No such file or directory: '/data/digits.npz'
            The job has failed for good.
 time       queue         8m50s  93 %
            start           40s   7 %
            together      9m30s   since 2026-01-15 11:50:00 UTC
 to do      After UserError: correct the code or the job, then delete it and create it anew. See
            docs/failures.md#usererror.
            Its log: tpujob logs digits -n default --failed""",
}


@pytest.mark.parametrize("stage", REPORTS)
def test_the_report(stage: str) -> None:
    job, pods = JOBS[stage]
    view = view_of(job, *pods)
    assert drawn(view, report_rows(view, "tpujob"), width=120) == REPORTS[stage]


LINES = {
    "running": [
        "digits: Running, attempt 1, v5litepod-16, 4/4 hosts, step 150/300, 3879.5 examples/s, loss 0.0150698,"
        " about 2m10s left, checkpoint 140"
    ],
    "failed": [
        "digits: Failed, attempt 1, v5litepod-16",
        "slice 0 host 2 (digits-1-0-2 on node-1) failed with UserError (exit code 1); the restart limit for UserError"
        " is 0",
        "UserError (exit code 1): slice 0 host 2 on node-1, attempt 1: FileNotFoundError: [Errno 2] No such"
        " file or directory: '/data/digits.npz' (digits.py:41)",
    ],
}


@pytest.mark.parametrize("stage", LINES)
def test_the_lines_without_a_terminal(stage: str) -> None:
    job, pods = JOBS[stage]
    assert [row.text for row in plain_rows(view_of(job, *pods))] == LINES[stage]


@pytest.mark.parametrize("stage", JOBS)
def test_a_line_does_not_change_by_the_clock_alone(stage: str) -> None:
    job, pods = JOBS[stage]
    view = view_of(job, *pods)
    hosts = [host for body in pods if (host := host_of(body)) is not None]
    assert plain_rows(job_view(job, hosts, NOON.replace(second=40))) == plain_rows(view)


@pytest.mark.parametrize(
    ("accelerator_type", "hosts", "groups"),
    [
        (
            "v5litepod-256",
            64,
            [
                "44/64 ready",
                "11 hosts: ContainerCreating (0/4, 0/9, 0/14, 0/19 and 7 more)",
                "9 hosts: no node: 0/2304 nodes are available (0/6, 0/13, 0/20, 0/27 and 5 more)",
            ],
        ),
        (
            "tpu7x-18432",
            2304,
            [
                "1580/2304 ready",
                "395 hosts: ContainerCreating (0/4, 0/9, 0/14, 0/19 and 391 more)",
                "329 hosts: no node: 0/2304 nodes are available (0/6, 0/13, 0/20, 0/27 and 325 more)",
            ],
        ),
    ],
)
def test_thousands_of_hosts_are_a_few_lines(accelerator_type: str, hosts: int, groups: list[str]) -> None:
    job, pods = large(accelerator_type, hosts)
    rows = live_rows(view_of(job, *pods))
    begin = next(index for index, row in enumerate(rows) if row.label == "hosts")
    assert [row.text for row in rows[begin : begin + 3]] == groups


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (ready(pod(node="n")), None),
        (ended(pod(node="n")), None),
        (pod(), "no node yet"),
        (pod(node="n"), "starting"),
        (waiting(pod(node="n"), "ContainerCreating"), "ContainerCreating"),
        (waiting(pod(node="n"), "ImagePullBackOff", "Back-off\n  pulling x"), "ImagePullBackOff: Back-off pulling x"),
        (with_status(pod(node="n"), phase="Running"), "running, not ready"),
        (deleted(ready(pod(node="n"))), "stopping"),
        (ended(pod(node="n"), 137, reason="OOMKilled"), "failed: OOMKilled, exit code 137"),
        (with_status(pod(node="n"), phase="Failed", reason="Evicted"), "failed: Evicted"),
    ],
)
def test_why_a_host_is_not_ready(body: Object, why: str | None) -> None:
    host = host_of(body)
    assert host is not None
    assert host.why == why


def test_a_long_reason_is_cut() -> None:
    host = host_of(waiting(pod(node="n"), "ErrImagePull", "x" * 5000))
    assert host is not None
    assert len(host.why or "") == 300


def test_a_pod_that_is_no_worker_of_the_job_is_not_counted() -> None:
    job, _ = JOBS["running"]
    stranger = ready(pod(0, owner="somebody else"))
    unlabelled = {**pod(1), "metadata": {**pod(1)["metadata"], "labels": {"tpu-operator.dev/job-name": "digits"}}}
    hosts = view_of(job, stranger, unlabelled).hosts
    assert hosts is not None
    assert (hosts.total, hosts.ready, hosts.earlier) == (4, 0, 0)


@pytest.mark.parametrize("stage", [stage for stage, (job, _) in JOBS.items() if "goodput" in job.get("status", {})])
def test_every_second_of_the_jobs_life_is_somewhere(stage: str) -> None:
    job, pods = JOBS[stage]
    shown = as_json(view_of(job, *pods), job["status"], "tpujob")["goodputNow"]
    parts = ("queue", "start", "productive", "wasted", "recovery", "suspended")
    life = 570 if shown["activity"] == "Finished" else 600
    assert sum(shown[f"{part}Seconds"] for part in parts) == life


def test_a_restart_counts_for_its_window_only() -> None:
    charged = {"Infrastructure": [time_at(-7000), time_at(-100)]}
    job = seen_job(
        spec={"runPolicy": {"restart": {"window": "1h", "limits": {"Infrastructure": 3}}}},
        restarts={"byClass": {"Infrastructure": 5}, "charged": charged},
    )
    budgets = {budget.failure_class: budget for budget in view_of(job).budgets}
    infrastructure = budgets["Infrastructure"]
    assert (infrastructure.total, infrastructure.counting, infrastructure.left) == (5, 1, 2)
    assert budgets["Preemption"].left is None


@pytest.mark.parametrize("failure_class", FailureClass)
def test_every_class_of_failure_has_its_advice_and_its_place_in_the_docs(failure_class: FailureClass) -> None:
    job, _ = JOBS["failed"]
    failed = {**job["status"]["lastFailure"], "class": failure_class}
    view = view_of({**job, "status": {**job["status"], "lastFailure": failed}})
    first, *_ = advice(view, "kubectl tpujob")
    assert first.startswith(f"After {failure_class}: ")
    assert first.endswith(f"See docs/failures.md#{failure_class.lower()}.")
    headings = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
    assert f"## {failure_class}" in headings
    assert advice(view, "kubectl tpujob")[-1] == "Its log: kubectl tpujob logs digits -n default --failed"


def test_a_job_out_of_time_is_not_told_to_mend_an_earlier_failure() -> None:
    job, _ = JOBS["failed"]
    conditions = [
        {**found, "reason": "DeadlineExceeded"} if found["type"] == "Failed" else found
        for found in job["status"]["conditions"]
    ]
    [told] = advice(view_of({**job, "status": {**job["status"], "conditions": conditions}}), "tpujob")
    assert "activeDeadlineSeconds" in told


def test_a_loop_of_ones_own_is_told_how_to_report() -> None:
    quiet = seen_job(spec={"trainer": {"image": "x", "command": ["python3", "train.py"]}})
    assert advice(view_of(quiet), "tpujob") == [
        "A loop of your own shows its steps here when it reports them: docs/progress.md."
    ]
    assert advice(view_of(seen_job()), "tpujob") == []


def test_what_a_newer_operator_wrote_is_still_shown() -> None:
    job = seen_job(progress={**progress(), "phase": "Pondering"}, goodput=goodput("Train", productive=1), future=[1])
    job["spec"]["runPolicy"] = {"restart": {"limits": {"CosmicRays": 3}}}
    job["status"]["state"] = "Levitating"
    view = view_of(job, *running_pods())
    assert headline(view) == "digits: Levitating, attempt 1, v5litepod-16"
    assert advice(view, "tpujob") == []
    assert view.budgets == ()
    assert live_rows(view)


def test_a_job_in_the_table_of_jobs() -> None:
    assert table_row(view_of(*_flat("restarting"))) == (
        "default", "digits", "Restarting", "v5litepod-16", "4", "3", "150/300", "2m10s", "3", "0.500", "10m00s",
    )  # fmt: skip
    assert table_row(view_of(*_flat("not seen")))[2:10] == ("-", "-", "-", "0", "-", "-", "0", "-")


def _flat(stage: str) -> list[Object]:
    job, pods = JOBS[stage]
    return [job, *pods]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (0.4, "0s"), (59, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90_000, "1d01h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_lost_connection_is_said_below_the_table() -> None:
    job, pods = JOBS["running"]
    view = view_of(job, *pods)
    note = "connection lost, trying again: GET https://192.0.2.1: connection refused"
    assert drawn(view, live_rows(view), note=note).splitlines()[-1] == note
