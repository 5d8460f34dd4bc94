"""The arithmetic behind docs/performance.md: what is timed, what is compared with what, what is not taken for a run."""

from __future__ import annotations

import json

import pytest

from bench.trainer.compare import Spread, interleaved, ratios
from bench.trainer.observed import doctor_cost
from bench.trainer.process import watch
from bench.trainer.reports import NotComparable, Report, check_learned, parse, steps_per_second
from bench.trainer.tables import doctor_table, features_table, filled_in, loops_table

LENGTH = {"steps": 400, "warmUp": 50}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 40: loss 2.25\n", Report(40, 2.25, 7.0)),
        ("step 39/450: loss 2.25, 1234.5 examples/s\n", Report(39, 2.25, 7.0)),
        ("step 450/450: accuracy 0.9\n", None),
        ("training took 3 steps: loss 2.25\n", None),
        ("\n", None),
    ],
)
def test_a_report_is_a_line_that_begins_with_a_step_and_its_loss(line: str, found: Report | None) -> None:
    assert parse(line, 7.0) == found


def test_the_rate_counts_from_the_first_report_after_the_warm_up_to_the_last() -> None:
    compiling, first, last = Report(9, 3.0, 0.0), Report(20, 2.0, 100.0), Report(120, 1.0, 102.0)
    assert steps_per_second([compiling, first, Report(60, 1.5, 101.9), last], warm_up=10) == 50.0


@pytest.mark.parametrize("reports", [[], [Report(9, 1.0, 0.0), Report(10, 1.0, 1.0)]])
def test_a_run_without_two_reports_after_the_warm_up_has_no_rate(reports: list[Report]) -> None:
    with pytest.raises(NotComparable, match="after 10 steps of warm-up"):
        steps_per_second(reports, warm_up=10)


@pytest.mark.parametrize("loss", [2.3, 5.0, float("inf"), float("nan")])
def test_a_loop_that_learns_nothing_is_not_compared(loss: float) -> None:
    with pytest.raises(NotComparable, match="nothing was learned"):
        check_learned([Report(10, 9.0, 0.0), Report(20, loss, 1.0)], chance=2.3)


def test_a_loop_whose_last_loss_is_clearly_below_chance_has_learned() -> None:
    check_learned([Report(10, 2.3, 0.0), Report(20, 1.5, 1.0)], chance=2.3)


def test_every_second_round_goes_backwards_and_every_name_keeps_its_own_results() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert interleaved(["a", "b", "c"], 3, run) == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_a_ratio_is_taken_within_each_round_so_that_a_slow_machine_cancels_out() -> None:
    rates = {"ours": [100.0, 50.0, 10.0], "theirs": [50.0, 25.0, 8.0]}
    assert ratios(rates, of="ours", to="theirs") == Spread(2.0, 1.25, 2.0)


def test_the_table_of_loops_gives_this_trainers_lead_over_each_of_the_others() -> None:
    part = {"stepsPerSecond": {"tpu-trainer": [120.0, 100.0, 110.0], "accelerate": [100.0, 100.0, 100.0]}}
    assert loops_table({**LENGTH, **part}).splitlines()[4:] == [
        "| this trainer | 110.0 | 100.0..120.0 |  |  |",
        "| Accelerate | 100.0 | 100.0..100.0 | 1.10x | 1.00..1.20 |",
    ]


def test_the_table_of_features_gives_what_each_adds_to_a_step() -> None:
    rates = {
        "plain": [100.0, 100.0, 100.0],
        "plain-pair": [60.0, 60.0, 60.0],
        "checkpoint": [50.0, 50.0, 50.0],
        "tensorboard": [80.0, 100.0, 125.0],
        "noise-scale": [60.0, 40.0, 50.0],
    }
    part = {"stepsPerSecond": rates}
    assert features_table({**LENGTH, **part}).splitlines()[4:] == [
        "| checkpoint every 50 steps | 100.0 % | 100.0..100.0 |",
        "| TensorBoard | 0.0 % | -20.0..25.0 |",
        "| gradient noise scale (2 hosts) | 20.0 % | 0.0..50.0 |",
    ]


def test_the_doctors_cost_is_what_its_account_grew_by_after_the_warm_up() -> None:
    def account(step: int, counters: float) -> str:
        return f"doctor at step {step}: {json.dumps({'programs': 0.5, 'counters': counters})}\n"

    lines = [(0.0, account(10, 0.1)), (1.0, account(20, 0.2)), (1.5, "step 20: loss 1\n"), (3.0, account(120, 0.3))]
    cost = doctor_cost(lines, warm_up=15)
    assert cost["atStart"] == {"programs": 0.5, "counters": 0.2}
    assert cost["perStep"] == {"programs": 0.0, "counters": pytest.approx(0.001)}
    assert cost["step"] == pytest.approx(0.02)
    assert [row.split("|")[2:5] for row in doctor_table({**LENGTH, "runs": [cost]}).splitlines()[4:]] == [
        [" 500.0 ms ", " 0.0 us ", " 0.00 % "],
        [" 200.0 ms ", " 1000.0 us ", " 5.00 % "],
    ]


def test_a_table_takes_the_place_of_the_one_between_its_marks_and_leaves_the_rest() -> None:
    document = "# Title\n\n<!-- mlp -->\nold\nrows\n<!-- end -->\n\n<!-- doctor -->\n<!-- end -->\n"
    once = filled_in(document, "mlp", "| new |")
    assert once == "# Title\n\n<!-- mlp -->\n| new |\n<!-- end -->\n\n<!-- doctor -->\n<!-- end -->\n"
    assert filled_in(once, "mlp", "| new |") == once
    assert filled_in(document, "transformer", "| new |") == document


def test_a_run_that_fails_is_no_result_and_says_what_it_printed() -> None:
    with pytest.raises(NotComparable, match=r"No module named bench\.nowhere"):
        watch("bench.nowhere", [], {})


def test_the_lines_of_a_run_carry_the_time_at_which_they_came() -> None:
    ((at, line),) = watch("platform", ["terse"], {})
    assert at > 0
    assert line.endswith("\n")
