"""A job at each stage of its life, word for word: live in `tpujob watch`, in full in `tpujob status`."""

import io
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.pods import deleted, ended, pod, ready, time_at, with_status
from tests.unit.seen_jobs import JOBS, Object, condition, large, progress, running_pods, seen_job, view_of, waiting
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import BestCheckpoint, ChipSeconds, Placement, Usage
from tpu_training_operator.cli.display import screen
from tpu_training_operator.cli.errors import BadInput
from tpu_training_operator.cli.job_view import JobView
from tpu_training_operator.cli.prices import Prices, load_prices
from tpu_training_operator.cli.sections import advice, headline, plain_lines, sections, state_style
from tpu_training_operator.cli.status import as_json, table_row
from tpu_training_operator.cli.words import duration
from tpu_training_operator.domain.hosts import host_of

ROOT = Path(__file__).parents[2]


def drawn(view: JobView, *, full: bool, width: int) -> str:
    """The lines on a screen of that width, without the blanks at their ends."""
    rows = [(found.label, found.full if full else found.brief, found.style) for found in sections(view, "tpujob")]
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(screen(headline(view), state_style(view), rows))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


LIVE = {
    "starting": """\
digits: Starting, attempt 1, v5litepod-16
 why        attempt 1: 1 of 4 hosts ready; 2 hosts: no node: 0/4 nodes are
            available: 4 Insufficient google.com/tpu.; 1 host: ContainerCreating
 hosts      1/4 ready
            2 hosts: no node: 0/4 nodes are available: 4 Insufficient
            google.com/tpu. (0/2, 0/3)
            1 host: ContainerCreating (0/1 on node-1)
 time       queue 9m50s""",
    "hung": """\
digits: Running, attempt 1, v5litepod-16
 hosts      4/4 ready
 step       150/300 ━━━━━━━━━━━━━━━─────────────── 50 %, training
 speed      3879.5 examples/s, loss 0.0150698
 checkpoint step 140
 reported   0s ago, no progress for 6m44s
 warning    host 3 is 2.1 times slower than the others
 time       queue 30s, start 1m40s, productive 11m44s; goodput 0.844""",
    "restarting": """\
digits: Restarting, attempt 4, v5litepod-16
 why        attempt 4 starts at 2026-01-15T12:13:19Z: slice 0 host 2
            (digits-3-0-2 on node-1) failed with Infrastructure (Killed, exit
            code 137): the worker was killed (exit code 137)
 next       attempt 4 in 4s
 hosts      0/4 ready
            4 hosts: no pod yet (0/0, 0/1, 0/2, 0/3)
            3 workers of earlier attempts still there
 step       155/300 ━━━━━━━━━━━━━━━─────────────── 51 %
 checkpoint step 140
 failure    Infrastructure (Killed, exit code 137): slice 0 host 2 on node-1,
            attempt 3, 1s ago
            the worker was killed (exit code 137)
 restarts   Infrastructure 2 (18 left), Preemption 1
 time       queue 2m30s, start 1m40s, productive 5m04s, recovery 4m01s; goodput
            0.382""",
}


@pytest.mark.parametrize("stage", LIVE)
def test_the_live_table(stage: str) -> None:
    assert drawn(JOBS[stage].view(), full=False, width=80) == LIVE[stage]


def test_the_best_checkpoint_is_named() -> None:
    view = JOBS["running"].view()
    best = BestCheckpoint(name="step-00000060-8b6b0c5e-1", step=60, metric="accuracy", value="0.9")
    status = replace(view.status, progress=replace(view.status.progress, best_checkpoint=best))
    named = "accuracy 0.9 at step 60, step-00000060-8b6b0c5e-1"
    assert f"\n best       {named}\n" in drawn(replace(view, status=status), full=False, width=80)
    assert f"  best: {named}" in plain_lines(replace(view, status=status))


REPORTS = {
    "moved": """\
digits: Running, attempt 5, v6e-16
 why        attempt 5: all 4 workers are ready on v6e-16
 slice      v6e-16 (4x4): 4 hosts, 16 chips, 16 replicas
 recipe     global batch 128, 8 per replica; 300 steps; learning rate 0.1
 moves      48m30s ago: v5p-32 to v6e-16: no nodes for v5p-32 within 600 s
            17m40s ago: v6e-16 to v5p-32 at step 120: 4 placeholders hold the nodes of v5p-32; the workers save and stop
            1m50s ago: v5p-32 to v6e-16 at step 200: v5p-32 did not come back within 600 s
            chip-hours: v6e-16 8.26, v5p-32 1.51, placeholders 0.08
 hosts      4/4 ready
 step       215/300 ━━━━━━━━━━━━━━━━━━━━━───────── 71 %, training
 speed      3879.5 examples/s, loss 0.0150698
 checkpoint step 200
 reported   0s ago
 failure    Infrastructure (NodeLost): slice 0 host 0 on v5p-32-3-0, pod digits-3-0-0, 11m50s ago, attempt 3
            Taint manager: deleting due to NoExecute taint
            The gang was restarted as attempt 4.
 restarts   Infrastructure    1   19 of 20 left (1 count: within 24h, no checkpoint since)
 time       queue        21m50s  37 %
            productive   36m00s  62 %   <- now
            moving          40s   1 %
            together     58m30s   since 2026-01-15 12:00:00 UTC
            goodput       0.615   productive share of the time without suspensions
 chips      9.86 chip-hours used
            queue 0.08, productive 9.60, moving 0.08, placeholders 0.08""",
    "restarting": """\
digits: Restarting, attempt 4, v5litepod-16
 why        attempt 4 starts at 2026-01-15T12:13:19Z: slice 0 host 2 (digits-3-0-2 on node-1) failed with Infrastructure
            (Killed, exit code 137): the worker was killed (exit code 137)
 next       attempt 4 in 4s
 slice      v5litepod-16 (4x4): 4 hosts, 16 chips, 16 replicas
 recipe     global batch 128, 8 per replica; 300 steps; learning rate 0.1
 hosts      0/4 ready
            4 hosts: no pod yet (0/0, 0/1, 0/2, 0/3)
            3 workers of earlier attempts still there
 step       155/300 ━━━━━━━━━━━━━━━─────────────── 51 %
 checkpoint step 140
 failure    Infrastructure (Killed, exit code 137): slice 0 host 2 on node-1, pod digits-3-0-2, 1s ago, attempt 3
            the worker was killed (exit code 137)
            The gang was restarted as attempt 4.
 first one  Preemption (Preempted, exit code 75): slice 0 host 2 on node-0, pod digits-1-0-2, 6m01s ago, attempt 1
            the worker exited with code 75
            The gang was restarted as attempt 2.
 restarts   Infrastructure    2   18 of 20 left (2 count: within 24h, no checkpoint since)
            Preemption        1   unlimited
 time       queue         2m30s  19 %
            start         1m40s  13 %
            productive    5m04s  38 %
            recovery      4m01s  30 %   <- now
            together     13m15s   since 2026-01-15 12:00:00 UTC
            goodput       0.382   productive share of the time without suspensions
 chips      2.59 chip-hours used
            start 0.44, productive 1.35, recovery 0.80""",
    "failed": """\
digits: Failed, attempt 1, v5litepod-16
 why        slice 0 host 2 (digits-1-0-2 on node-0) failed with UserError (exit code 1): FileNotFoundError: [Errno 2] No
            such file or directory: '/data/digits.npz' (digits.py:41); the restart limit for UserError is 0
 slice      v5litepod-16 (4x4): 4 hosts, 16 chips, 16 replicas
 recipe     global batch 128, 8 per replica; 300 steps; learning rate 0.1
 failure    UserError (exit code 1): slice 0 host 2 on node-0, pod digits-1-0-2, 1m30s ago, attempt 1
            Traceback (most recent call last):
              File "/app/digits.py", line 41, in task
                data = load(hp.path)
            FileNotFoundError: [Errno 2] No such file or directory: '/data/digits.npz'
            The job has failed for good.
 time       queue           30s  30 %
            start           40s  40 %
            wasted          30s  30 %
            together      1m40s   since 2026-01-15 12:00:00 UTC
 chips      0.51 chip-hours used
            start 0.17, wasted 0.13, stopping 0.20
 to do      After UserError: correct the code or the job, then delete the job and create it again. See
            docs/failures.md#usererror.
            Its log: tpujob logs digits -n default --failed""",
}


@pytest.mark.parametrize("stage", REPORTS)
def test_the_report(stage: str) -> None:
    assert drawn(JOBS[stage].view(), full=True, width=120) == REPORTS[stage]


LINES = {
    "running": [
        "digits: Running, attempt 1, v5litepod-16, 4/4 hosts, step 150/300, 3879.5 examples/s, loss 0.0150698,"
        " about 2m10s left, checkpoint 140"
    ],
    "restarting": [
        "digits: Restarting, attempt 4, v5litepod-16, 0/4 hosts, 4 hosts: no pod yet (0/0, 0/1, 0/2, 0/3),"
        " step 155/300, loss 0.0150698, checkpoint 140",
        "  why: attempt 4 starts at 2026-01-15T12:13:19Z: slice 0 host 2 (digits-3-0-2 on node-1) failed with"
        " Infrastructure (Killed, exit code 137): the worker was killed (exit code 137)",
        "  failure: Infrastructure (Killed, exit code 137): slice 0 host 2 on node-1, attempt 3:"
        " the worker was killed (exit code 137)",
    ],
}


@pytest.mark.parametrize("stage", LINES)
def test_the_lines_without_a_terminal(stage: str) -> None:
    assert plain_lines(JOBS[stage].view()) == LINES[stage]


@pytest.mark.parametrize("stage", JOBS)
def test_the_lines_without_a_terminal_do_not_change_with_the_clock(stage: str) -> None:
    assert plain_lines(JOBS[stage].view(seconds_later=40)) == plain_lines(JOBS[stage].view())


def test_the_metrics_of_the_last_evaluation_are_shown() -> None:
    view = JOBS["succeeded"].view()
    assert " metrics    loss 0.0150698, accuracy 0.972222\n" in drawn(view, full=False, width=80)
    assert "  metrics: loss 0.0150698, accuracy 0.972222" in plain_lines(view)


@pytest.mark.parametrize("stage", JOBS)
def test_the_live_table_is_part_of_the_report(stage: str) -> None:
    for section in sections(JOBS[stage].view(), "tpujob"):
        assert section.full
        assert len(section.brief) <= len(section.full)


@pytest.mark.parametrize(
    ("accelerator_type", "hosts", "groups"),
    [
        (
            "v5litepod-256",
            64,
            (
                "44/64 ready",
                "11 hosts: ContainerCreating (0/4, 0/9, 0/14, 0/19 and 7 more)",
                "9 hosts: no node: 0/2304 nodes are available (0/6, 0/13, 0/20, 0/27 and 5 more)",
            ),
        ),
        (
            "tpu7x-18432",
            2304,
            (
                "1580/2304 ready",
                "395 hosts: ContainerCreating (0/4, 0/9, 0/14, 0/19 and 391 more)",
                "329 hosts: no node: 0/2304 nodes are available (0/6, 0/13, 0/20, 0/27 and 325 more)",
            ),
        ),
    ],
)
def test_thousands_of_hosts_take_a_few_lines(accelerator_type: str, hosts: int, groups: tuple[str, ...]) -> None:
    job, pods = large(accelerator_type, hosts)
    [shown] = [section for section in sections(view_of(job, *pods), "tpujob") if section.label == "hosts"]
    assert shown.brief == groups


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


def test_a_pod_that_is_not_a_worker_of_the_job_is_not_counted() -> None:
    stranger = ready(pod(0, owner="somebody else"))
    unlabelled = {**pod(1), "metadata": {**pod(1)["metadata"], "labels": {"tpu-operator.dev/job-name": "digits"}}}
    hosts = view_of(seen_job(), stranger, unlabelled).hosts
    assert hosts is not None
    assert (hosts.total, hosts.ready, hosts.earlier) == (4, 0, 0)


@pytest.mark.parametrize("stage", [stage for stage, seen in JOBS.items() if "goodput" in seen.job.get("status", {})])
def test_every_second_of_the_jobs_life_is_accounted_for(stage: str) -> None:
    view = JOBS[stage].view()
    shown = as_json(view, JOBS[stage].job["status"])["goodputNow"]
    parts = ("queue", "start", "productive", "wasted", "recovery", "moving", "suspended")
    assert sum(shown.get(f"{part}Seconds", 0) for part in parts) == view.life


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
def test_every_failure_class_has_advice_and_a_place_in_the_docs(failure_class: FailureClass) -> None:
    job = JOBS["failed"].job
    last = {**job["status"]["lastFailure"], "class": failure_class}
    view = view_of({**job, "status": {**job["status"], "lastFailure": last}})
    first, *_ = advice(view, "kubectl tpujob")
    assert first.startswith(f"After {failure_class}: ")
    assert first.endswith(f"See docs/failures.md#{failure_class.lower()}.")
    headings = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
    assert f"## {failure_class}" in headings
    assert advice(view, "kubectl tpujob")[-1] == "Its log: kubectl tpujob logs digits -n default --failed"


def test_a_job_that_failed_a_gate_is_told_where_the_log_of_its_rung_is() -> None:
    failed = condition("Failed", "True", "GateFailed", "rung 1 of 3 on v5litepod-4: lossFalls failed: ...")
    [told] = advice(view_of(seen_job("Failed", also=(failed,))), "tpujob")
    assert told.startswith("The log of the rung: tpujob logs digits -n default. Correct")


def test_a_job_that_ran_out_of_time_gets_no_advice_about_an_earlier_failure() -> None:
    job = JOBS["failed"].job
    conditions = [
        {**found, "reason": "DeadlineExceeded"} if found["type"] == "Failed" else found
        for found in job["status"]["conditions"]
    ]
    [told] = advice(view_of({**job, "status": {**job["status"], "conditions": conditions}}), "tpujob")
    assert "activeDeadlineSeconds" in told


def test_a_gang_without_nodes_is_sent_to_the_schedulers_words() -> None:
    [told] = advice(JOBS["starting"].view(), "tpujob")
    assert told.endswith("kubectl describe pod digits-1-0-2")


def test_a_users_own_loop_is_told_how_to_report() -> None:
    quiet = seen_job(spec={"trainer": {"image": "x", "command": ["python3", "train.py"]}})
    assert advice(view_of(quiet), "tpujob") == [
        "Your own loop shows its steps here if it reports them: docs/progress.md."
    ]
    assert advice(view_of(seen_job()), "tpujob") == []


def test_what_a_newer_operator_wrote_is_still_shown() -> None:
    job = seen_job("Levitating", progress={**progress(1), "phase": "Pondering"}, future=[1])
    job["spec"]["runPolicy"] = {"restart": {"limits": {"CosmicRays": 3}}}
    view = view_of(job, *running_pods())
    assert headline(view) == "digits: Levitating, attempt 1, v5litepod-16"
    assert advice(view, "tpujob") == []
    assert view.budgets == ()
    assert sections(view, "tpujob")


def test_a_job_in_the_table_of_jobs() -> None:
    assert table_row(JOBS["running"].view()) == (
        "default", "digits", "Running", "v5litepod-16", "4", "1", "150/300", "2m10s", "0", "0.700", "7m14s",
    )  # fmt: skip
    assert table_row(JOBS["not seen"].view())[2:10] == ("-", "-", "-", "0", "-", "-", "0", "-")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (0.4, "0s"), (59, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90_000, "1d01h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_lost_connection_is_reported_below_the_table() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(screen("digits", "", [("step", ["1/2"], "")], "connection lost"))
    assert text.getvalue().splitlines()[-1].rstrip() == "connection lost"


def with_chips(view: JobView, *, chip_hours: int | None = 20, forecast: str | None = "40.10") -> JobView:
    """It has used 12.34 chip-hours and holds 16 chips."""
    assert view.goodput is not None
    spent = ChipSeconds(start=3600, productive=40824, held=16, since=view.goodput.since)
    usage = Usage(chip_hours="12.34", forecast_chip_hours=forecast, budget_chip_hours=chip_hours)
    status = replace(view.status, usage=usage)
    return replace(view, status=status, goodput=replace(view.goodput, chip_seconds=spent))


def chips_of(view: JobView) -> list[str]:
    return [line for section in sections(view, "tpujob") if section.label == "chips" for line in section.full]


def test_chip_hours_are_shown_with_the_budget_the_forecast_and_what_they_were_for() -> None:
    assert chips_of(with_chips(JOBS["hung"].view())) == [
        "12.34 of 20 chip-hours used; the rest lasts 28m43s at 16 chips; about 40.10 when it ends, more than the"
        " budget",
        "start 1.00, productive 11.34",
    ]
    without = with_chips(JOBS["hung"].view(), chip_hours=None, forecast=None)
    assert chips_of(without)[0] == "12.34 chip-hours used"


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ({"v5e": "2"}, "cost 24.68 EUR so far, about 80.20 EUR when it ends"),
        ({"v5e": "2", "v5litepod-16": "1"}, "cost 12.34 EUR so far, about 40.10 EUR when it ends"),
        ({"v4": "2"}, "cost unknown: the table has no price for v5litepod-16"),
    ],
)
def test_a_price_is_that_of_the_type_or_of_its_generation(table: dict[str, str], shown: str) -> None:
    prices = Prices("EUR", {name: Decimal(price) for name, price in table.items()})
    assert chips_of(replace(with_chips(JOBS["hung"].view()), prices=prices))[-1] == shown


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        # 5 chip-hours on the v5p before, 7.34 on the v5e since, 1 of them of placeholders.
        ({"v5e": "2", "v5p": "4"}, "cost 34.68 EUR so far, about 90.20 EUR when it ends"),
        ({"v5e": "2"}, "cost unknown: the table has no price for 2 x v5p-8 (spot)"),
    ],
)
def test_a_job_that_moved_pays_the_price_of_each_slice(table: dict[str, str], shown: str) -> None:
    view = with_chips(JOBS["hung"].view())
    spent = {"2 x v5p-8 (spot)": 18000, "v5litepod-16": 22824, "placeholders": 3600}
    placement = Placement(
        alternative=1, slice="v5litepod-16", since="2026-03-01T12:00:00Z", reason="Lost", chip_seconds=spent
    )
    view = replace(view, status=replace(view.status, placement=placement))
    prices = Prices("EUR", {name: Decimal(price) for name, price in table.items()})
    assert chips_of(replace(view, prices=prices))[-1] == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("perChipHour: {v5e: -1}", "perChipHour.v5e: -1 is not a price"),
        ("perChipHour: {v5e: .nan}", "perChipHour.v5e: nan is not a price"),
        ("perChipHour: {v5e: [1]}", "perChipHour.v5e: [1] is not a price"),
        ("perChipHour: {}", "a table of prices has perChipHour"),
        ("v5e: 1", "a table of prices has perChipHour"),
        ("perChipHour: {v5e: 1}\nregion: us", "a table of prices has perChipHour"),
        ("- 1", "a table of prices has perChipHour"),
        ("{", "cannot be read"),
        (None, "no such file or directory"),
    ],
)
def test_a_table_of_prices_that_is_none_is_refused_with_the_reason(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "prices.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(said)):
        load_prices(path)


def test_a_table_of_prices_is_read_with_or_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("currency: EUR\nperChipHour: {v5e: 1.20, v4: '3'}\n")
    assert load_prices(path) == Prices("EUR", {"v5e": Decimal("1.2"), "v4": Decimal(3)})


def test_a_job_that_runs_in_another_cluster_has_no_hosts_here() -> None:
    view = view_of(seen_job(spec={"managedBy": "kueue.x-k8s.io/multikueue"}))
    text = drawn(view, full=True, width=100)
    assert "managed by kueue.x-k8s.io/multikueue: Kueue runs the job in another cluster" in " ".join(text.split())
    assert "hosts" not in [section.label for section in sections(view, "tpujob")]


def test_of_a_job_that_others_manage_it_is_said_who_does() -> None:
    job = seen_job(spec={"managedBy": "example.com/somebody"})
    del job["status"]
    view = view_of(job)
    assert headline(view) == "digits: managed by example.com/somebody"
    assert "this cluster's operator ignores the job" in " ".join(drawn(view, full=True, width=200).split())
    assert advice(view, "tpujob") == []


def test_what_the_compiler_says_of_the_step_is_in_the_full_story_only() -> None:
    said = "v5litepod-16: fits, 6.00 GiB of 15.75 GiB of HBM per core"
    view = view_of(seen_job(also=(condition("StepFits", "True", "StepFits", said),)))
    assert f"compiled {said}" in " ".join(drawn(view, full=True, width=100).split())
    assert said not in drawn(view, full=False, width=100)
