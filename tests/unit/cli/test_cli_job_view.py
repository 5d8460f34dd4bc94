"""A job at each stage of its life, word for word: live in `tpujob watch`, in full in `tpujob status`."""

import io
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from tests.unit.pods import deleted, ended, pod, ready, time_at, with_status
from tests.unit.seen_jobs import JOBS, Object, condition, large, progress, running_pods, seen_job, view_of, waiting
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import AttemptStart, BestCheckpoint, ChipSeconds, Placement, Usage
from tpu_training_operator.api.words import duration
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.prices import Prices, load_prices
from tpu_training_operator.cli.watch.display import screen
from tpu_training_operator.cli.watch.job_view import JobView
from tpu_training_operator.cli.watch.sections import advice, headline, plain_lines, sections, state_style
from tpu_training_operator.cli.watch.status import as_json, table_row
from tpu_training_operator.domain.cluster_state.hosts import host_of

ROOT = Path(__file__).parents[3]


def drawn(view: JobView, *, full: bool, width: int) -> str:
    """The lines on a screen of that width, without the blanks at their ends."""
    rows = [(found.label, found.full if full else found.brief, found.style) for found in sections(view, "tpujob")]
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(screen(headline(view), state_style(view), rows))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@pytest.mark.parametrize("stage", ["starting", "hung", "restarting"])
def test_the_live_table(stage: str, snapshot: SnapshotAssertion) -> None:
    assert drawn(JOBS[stage].view(), full=False, width=80) == snapshot


def test_the_best_checkpoint_is_named() -> None:
    view = JOBS["running"].view()
    best = BestCheckpoint(name="step-00000060-8b6b0c5e-1", step=60, metric="accuracy", value="0.9")
    status = replace(view.status, progress=replace(view.status.progress, best_checkpoint=best))
    named = "accuracy 0.9 at step 60, step-00000060-8b6b0c5e-1"
    assert f"\n best       {named}\n" in drawn(replace(view, status=status), full=False, width=80)
    assert f"  best: {named}" in plain_lines(replace(view, status=status))


@pytest.mark.parametrize("stage", ["moved", "restarting", "failed"])
def test_the_report(stage: str, snapshot: SnapshotAssertion) -> None:
    assert drawn(JOBS[stage].view(), full=True, width=120) == snapshot


def test_the_starts_are_a_table(snapshot: SnapshotAssertion) -> None:
    """The last four of them; a phase that took no time in any has no row, and one under way has no sum."""
    told = {"noticed": 2, "backoff": 0, "cleared": 31, "bound": 67, "started": 5, "imports": 9, "compiled": 20}
    starts = [
        AttemptStart(attempt=1, cause="WaitingForWorkers", since=time_at(0), seconds={"bound": 9}, total_seconds=9),
        *(
            AttemptStart(attempt=attempt, cause="Infrastructure", since=time_at(0), seconds=told, total_seconds=134)
            for attempt in (2, 3, 4)
        ),
        AttemptStart(attempt=5, cause="Preemption", since=time_at(0), seconds={"noticed": 1}),
    ]
    view = JOBS["running"].view()
    view = replace(view, status=replace(view.status, starts=starts))
    [shown] = [section for section in sections(view, "tpujob") if section.label == "starts"]
    assert shown.brief == ()
    assert "\n".join(shown.full) == snapshot


@pytest.mark.parametrize("stage", ["running", "restarting"])
def test_the_lines_without_a_terminal(stage: str, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(plain_lines(JOBS[stage].view())) == snapshot


@pytest.mark.parametrize("stage", JOBS)
def test_the_lines_without_a_terminal_do_not_change_with_the_clock(stage: str) -> None:
    assert plain_lines(JOBS[stage].view(seconds_later=40)) == plain_lines(JOBS[stage].view())


def test_the_metrics_of_the_last_evaluation_are_shown() -> None:
    view = JOBS["succeeded"].view()
    metrics = "loss 0.0150698, accuracy 0.972222"
    assert metrics in drawn(view, full=False, width=80)
    assert metrics in plain_lines(view)[-1]


@pytest.mark.parametrize("stage", JOBS)
def test_the_live_table_is_part_of_the_report(stage: str) -> None:
    for section in sections(JOBS[stage].view(), "tpujob"):
        assert section.full
        assert len(section.brief) <= len(section.full)


@pytest.mark.parametrize(
    ("accelerator_type", "hosts", "ready", "more"),
    [
        ("v5litepod-256", 64, "44/64 ready", ["7 more", "5 more"]),
        ("tpu7x-18432", 2304, "1580/2304 ready", ["391 more", "325 more"]),
    ],
)
def test_thousands_of_hosts_take_a_few_lines(
    accelerator_type: str, hosts: int, ready: str, more: list[str], snapshot: SnapshotAssertion
) -> None:
    job, pods = large(accelerator_type, hosts)
    [shown] = [section for section in sections(view_of(job, *pods), "tpujob") if section.label == "hosts"]
    assert shown.brief[0] == ready
    assert re.findall(r"\d+ more", " ".join(shown.brief)) == more
    assert "\n".join(shown.brief) == snapshot


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
    assert host.why == why


def test_a_long_reason_is_cut() -> None:
    host = host_of(waiting(pod(node="n"), "ErrImagePull", "x" * 5000))
    assert len(host.why or "") == 300


def test_a_pod_that_is_not_a_worker_of_the_job_is_not_counted() -> None:
    stranger = ready(pod(0, owner="somebody else"))
    unlabelled = {**pod(1), "metadata": {**pod(1)["metadata"], "labels": {"tpu-operator.dev/job-name": "digits"}}}
    hosts = view_of(seen_job(), stranger, unlabelled).hosts
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
        spec={"runPolicy": {"restart": {"windowSeconds": 3600, "limits": [{"class": "Infrastructure", "max": 3}]}}},
        restarts={"byClass": {"Infrastructure": 5}, "charged": charged},
    )
    restarts = {each.failure_class: each for each in view_of(job).restarts_by_class}
    infrastructure = restarts["Infrastructure"]
    assert (infrastructure.total, infrastructure.counting, infrastructure.left) == (5, 1, 2)
    assert restarts["Preemption"].left is None


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
    assert "kubectl tpujob logs digits" in advice(view, "kubectl tpujob")[-1]


def test_a_job_that_failed_a_gate_is_told_where_the_log_of_its_rung_is(snapshot: SnapshotAssertion) -> None:
    failed = condition("Failed", "True", "GateFailed", "rung 1 of 3 on v5litepod-4: lossFalls failed: ...")
    [told] = advice(view_of(seen_job("Failed", also=(failed,))), "tpujob")
    assert "tpujob logs digits -n default" in told
    assert told == snapshot


def test_a_job_that_ran_out_of_time_gets_no_advice_about_an_earlier_failure() -> None:
    job = JOBS["failed"].job
    conditions = [
        {**found, "reason": "DeadlineExceeded"} if found["type"] == "Failed" else found
        for found in job["status"]["conditions"]
    ]
    [told] = advice(view_of({**job, "status": {**job["status"], "conditions": conditions}}), "tpujob")
    assert "activeDeadlineSeconds" in told


def test_a_gang_without_nodes_is_sent_to_the_schedulers_words(snapshot: SnapshotAssertion) -> None:
    [told] = advice(JOBS["starting"].view(), "tpujob")
    assert told.endswith("describe pod digits-1-0-2")
    assert told == snapshot


def test_a_users_own_loop_is_told_how_to_report() -> None:
    quiet = seen_job(spec={"trainer": {"image": "x", "command": ["python3", "train.py"]}})
    [told] = advice(view_of(quiet), "tpujob")
    assert "docs/progress.md" in told
    assert advice(view_of(seen_job()), "tpujob") == []


def test_what_a_newer_operator_wrote_is_still_shown() -> None:
    job = seen_job("Levitating", progress={**progress(1), "phase": "Pondering"}, future=[1])
    job["spec"]["runPolicy"] = {"restart": {"limits": [{"class": "CosmicRays", "max": 3}]}}
    view = view_of(job, *running_pods())
    assert "Levitating" in headline(view)
    assert advice(view, "tpujob") == []
    assert view.restarts_by_class == ()
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
    spent = ChipSeconds(start=3600, productive=40824, held=16, since=view.goodput.since)
    usage = Usage(chip_hours="12.34", forecast_chip_hours=forecast, budget_chip_hours=chip_hours)
    status = replace(view.status, usage=usage)
    return replace(view, status=status, goodput=replace(view.goodput, chip_seconds=spent))


def chips_of(view: JobView) -> list[str]:
    return [line for section in sections(view, "tpujob") if section.label == "chips" for line in section.full]


def test_chip_hours_are_shown_with_the_budget_the_forecast_and_what_they_were_for(snapshot: SnapshotAssertion) -> None:
    used, what_for = chips_of(with_chips(JOBS["hung"].view()))
    assert re.findall(r"\d\S*", used) == ["12.34", "20", "28m43s", "16", "40.1"]
    assert re.findall(r"\d\S*", what_for) == ["1.00,", "11.34"]
    assert [used, what_for] == snapshot
    without = with_chips(JOBS["hung"].view(), chip_hours=None, forecast=None)
    assert chips_of(without)[0] == "12.34 chip-hours used"


@pytest.mark.parametrize(
    ("table", "costs"),
    [
        ({"v5e": "2"}, ["24.68 EUR", "80.20 EUR"]),
        ({"v5e": "2", "v5litepod-16": "1"}, ["12.34 EUR", "40.10 EUR"]),
        ({"v4": "2"}, []),
    ],
    ids=["of the generation", "of the type", "none"],
)
def test_a_price_is_that_of_the_type_or_of_its_generation(
    table: dict[str, str], costs: list[str], snapshot: SnapshotAssertion
) -> None:
    prices = Prices("EUR", {name: Decimal(price) for name, price in table.items()})
    line = chips_of(replace(with_chips(JOBS["hung"].view()), prices=prices))[-1]
    assert re.findall(r"[\d.]+ EUR", line) == costs
    assert line == snapshot


@pytest.mark.parametrize(
    ("table", "costs"),
    [
        # 5 chip-hours on the v5p before, 7.34 on the v5e since, 1 of them of placeholders.
        ({"v5e": "2", "v5p": "4"}, ["34.68 EUR", "90.20 EUR"]),
        ({"v5e": "2"}, []),
    ],
    ids=["both", "one"],
)
def test_a_job_that_moved_pays_the_price_of_each_slice(
    table: dict[str, str], costs: list[str], snapshot: SnapshotAssertion
) -> None:
    view = with_chips(JOBS["hung"].view())
    spent = {"2 x v5p-8 (spot)": 18000, "v5litepod-16": 22824, "placeholders": 3600}
    placement = Placement(
        option_index=1, slice="v5litepod-16", since="2026-03-01T12:00:00Z", reason="Lost", chip_seconds=spent
    )
    view = replace(view, status=replace(view.status, placement=placement))
    prices = Prices("EUR", {name: Decimal(price) for name, price in table.items()})
    line = chips_of(replace(view, prices=prices))[-1]
    assert re.findall(r"[\d.]+ EUR", line) == costs
    assert line == snapshot


@pytest.mark.parametrize(
    "text",
    [
        "perChipHour: {v5e: -1}",
        "perChipHour: {v5e: .nan}",
        "perChipHour: {v5e: [1]}",
        "perChipHour: {}",
        "v5e: 1",
        "perChipHour: {v5e: 1}\nregion: us",
        "- 1",
        "{",
        None,
    ],
)
def test_a_table_of_prices_that_is_none_is_refused_with_the_reason(
    tmp_path: Path, text: str | None, snapshot: SnapshotAssertion
) -> None:
    path = tmp_path / "prices.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_prices(path)
    assert str(caught.value) == snapshot


def test_a_table_of_prices_is_read_with_or_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("currency: EUR\nperChipHour: {v5e: 1.20, v4: '3'}\n")
    assert load_prices(path) == Prices("EUR", {"v5e": Decimal("1.2"), "v4": Decimal(3)})


def test_a_job_that_runs_in_another_cluster_has_no_hosts_here(snapshot: SnapshotAssertion) -> None:
    view = view_of(seen_job(spec={"managedBy": "kueue.x-k8s.io/multikueue"}))
    text = drawn(view, full=True, width=100)
    assert "kueue.x-k8s.io/multikueue" in text
    assert text == snapshot
    assert "hosts" not in [section.label for section in sections(view, "tpujob")]


def test_of_a_job_that_others_manage_it_is_said_who_does(snapshot: SnapshotAssertion) -> None:
    job = seen_job(spec={"managedBy": "example.com/somebody"})
    del job["status"]
    view = view_of(job)
    text = drawn(view, full=True, width=200)
    assert "example.com/somebody" in text
    assert text == snapshot
    assert advice(view, "tpujob") == []


def test_what_the_compiler_says_of_the_step_is_in_the_full_story_only() -> None:
    said = "v5litepod-16: fits, 6.00 GiB of 15.75 GiB"
    view = view_of(seen_job(also=(condition("StepFits", "True", "StepFits", said),)))
    assert f"compiled {said}" in " ".join(drawn(view, full=True, width=100).split())
    assert said not in drawn(view, full=False, width=100)
