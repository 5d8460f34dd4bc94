"""The gates of a rung, as a table: what the trainer measured, whether each gate passes, and with which message."""

import json
from typing import Any

import pytest

from tpu_training_operator.api.ladder import Gates
from tpu_training_operator.api.status import RungLoss
from tpu_training_operator.domain.job.rung_gates import Pace, judge
from tpu_training_operator.domain.job.rung_losses import compare, loss_points
from tpu_training_operator.domain.job.trainer_report import LastWords, ReportedCurve, read_last_words

GOOD: dict[str, Any] = {
    "outcome": "Succeeded",
    "step": 40,
    "examplesPerSecond": 900.0,
    "metrics": {"loss": 1.0, "accuracy": 0.5},
    "rung": {
        "firstLoss": 2.0,
        "firstError": 0.012,
        "lastLoss": 1.0,
        "lastError": None,
        "averaged": 10,
        "errorsFallen": 9.0,
        "rise": None,
        "utilisation": None,
        "recompilations": 0,
        "notFinite": 0,
        "findings": {"Padding": 1},
        "unseen": ["MidStepExecution"],
        "evaluated": ["accuracy", "f1"],
    },
}
OFF = {"lossFalls": False, "finite": False, "noRecompilation": False}
# 100 examples per second per chip, and 90 on the twice as large rung.
BEFORE = Pace(500.0, 5)
CHIPS, STEPS = 10, 40


def measurement(**changes: Any) -> LastWords:
    """The last words of a good rung, with changes; they are of the rung's numbers, if these have such a field."""
    rung = {name: value for name, value in changes.items() if name in GOOD["rung"]}
    rest = {name: value for name, value in changes.items() if name not in rung}
    return LastWords.model_validate(GOOD | rest | {"rung": GOOD["rung"] | rung})


def judge_one(gates: dict[str, Any], measured: LastWords, before: Pace | None = BEFORE) -> tuple[bool, str]:
    pace = Pace(measured.rate, CHIPS)
    (result,) = judge(Gates.model_validate(OFF | gates), STEPS, measured, pace, before)
    return result.passed, result.message


FALLS, FINITE, STEADY = {"lossFalls": True}, {"finite": True}, {"noRecompilation": True}


def evaluated(**bounds: str) -> dict[str, Any]:
    return {"evaluation": {"metric": "accuracy", **bounds}}


@pytest.mark.parametrize(
    ("gates", "measured", "passes", "words"),
    [
        (FALLS, measurement(), True, "from 2 ± 0.01 to 1 (means of 10 steps; all losses in order: 9.0"),
        (FALLS, measurement(errorsFallen=-1.0), False, "did not fall from 2 ± 0.01 to 1"),
        (FALLS, measurement(errorsFallen=0.0, lastError=0.3), False, "did not fall from 2 ± 0.01 to 1 ± 0.3"),
        (
            FALLS,
            measurement(errorsFallen=1.3),
            False,
            "1.3 standard errors), 2.58 are required; 48 more steps",
        ),
        (FALLS, measurement(errorsFallen=0.01), False, "126 more steps would tell (steps: 166)"),
        (FALLS, measurement(errorsFallen=None), False, "the losses"),
        (FALLS, measurement(lastLoss=None), False, "the losses"),
        (FALLS, measurement(rise={"start": 2.3, "peak": 12.91, "step": 10}), False, "from 2.3 to 12.91 at step 10"),
        (FINITE, measurement(), True, "all steps were finite"),
        (FINITE, measurement(notFinite=3), False, "3 steps"),
        (FINITE, measurement(notFinite=None), False, "did not report the number"),
        (STEADY, measurement(), True, "no program was compiled"),
        (STEADY, measurement(recompilations=1), False, "1 program"),
        (STEADY, measurement(recompilations=None), False, "did not report the number"),
        ({"minEfficiency": "0.9"}, measurement(), True, "90 examples/s per chip"),
        ({"minEfficiency": "0.91"}, measurement(), False, "0.9, at least 0.91"),
        ({"minEfficiency": "0.1"}, measurement(examplesPerSecond=None), False, "examples per second"),
        ({"minEfficiency": "0.1"}, measurement(examplesPerSecond=0.0), False, "0, at least 0.1"),
        ({"minEfficiency": "0.1"}, measurement(examplesPerSecond=-5.0), False, "examples per second"),
        ({"minExamplesPerSecondPerChip": "90"}, measurement(), True, "examples/s per chip 90, at least 90 required"),
        ({"minExamplesPerSecondPerChip": "90.1"}, measurement(), False, "at least 90.1 required"),
        ({"minExamplesPerSecondPerChip": "1"}, measurement(examplesPerSecond=None), False, "examples/s per chip"),
        ({"minUtilisation": "0.3"}, measurement(utilisation=0.31), True, "utilisation 0.31, at least 0.3 required"),
        ({"minUtilisation": "0.3"}, measurement(utilisation=0.29), False, "utilisation 0.29, at least 0.3 required"),
        ({"minUtilisation": "0.3"}, measurement(), False, "did not report the utilisation"),
        ({"noFindings": ["HostSync", "CpuFallback"]}, measurement(), True, "no HostSync or CpuFallback"),
        ({"noFindings": ["Padding"]}, measurement(), False, "the doctor found Padding (1)"),
        ({"noFindings": ["Padding"]}, measurement(findings=None), False, "did not report the findings"),
        ({"noFindings": ["MidStepExecution"]}, measurement(), False, "MidStepExecution"),
        (evaluated(min="0.5"), measurement(), True, "accuracy 0.5, at least 0.5"),
        (evaluated(min="0.51"), measurement(), False, "accuracy 0.5, at least 0.51"),
        (evaluated(max="-0.1"), measurement(), False, "accuracy 0.5, at most -0.1"),
        (evaluated(min="0.1", max="0.6"), measurement(), True, "at least 0.1 and at most 0.6"),
        (evaluated(min="0"), measurement(metrics={"f1": 1.0}), False, "it has f1"),
        (evaluated(min="0"), measurement(metrics={}), False, "it has no metrics"),
        (evaluated(min="0"), measurement(evaluated=[]), False, "it has no metrics"),
        ({"evaluation": {"metric": "loss", "max": "9"}}, measurement(), False, "it has accuracy"),
    ],
)
def test_gates(gates: dict[str, Any], measured: LastWords, passes: bool, words: str) -> None:
    passed, message = judge_one(gates, measured)
    assert passed is passes
    assert words in message


def test_a_rung_is_asked_for_a_falling_finite_loss_and_no_recompilation_by_default() -> None:
    gates = [result.name for result in judge(Gates(), STEPS, measurement(), Pace(1.0, 1), None)]
    assert gates == ["lossFalls", "finite", "noRecompilation"]


def points(*losses: float, batch: int, error: float = 0.01) -> list[RungLoss]:
    """The losses of every fourth step."""
    return [
        RungLoss(examples=4 * batch * number, loss=str(loss), error=str(error)) for number, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("here", "before", "passes", "words"),
    [
        # The last quarter of 512 examples: of the larger batch the second of its points, of the smaller the last four.
        (points(2.0, 1.0, 0.5, 0.2, batch=64), points(*[2.0] * 12, *[1.0] * 4, batch=8), True, "between 384 and 512"),
        (points(2.0, 1.0, 9.0, 9.0, batch=64), points(*[2.0] * 12, *[1.0] * 4, batch=8), True, "loss 1 ± 0.01, and 1"),
        (points(2.0, 1.1, 0.5, 0.2, batch=64), points(*[2.0] * 12, *[1.0] * 4, batch=8), False, "+0.1, tolerated"),
        (points(2.0, 1.07, 0.5, batch=64), points(*[2.0] * 12, *[1.0] * 4, batch=8), True, "0.05 and 0.026 for the"),
        (points(2.0, 0.1, batch=64), points(2.0, 1.0, batch=64), True, "-0.9, tolerated"),
        (points(2.0, 1.5, batch=64, error=0.3), points(2.0, 1.0, batch=64), True, "+0.5"),
        ([], points(2.0, 1.0, batch=64), False, "did not report the losses by examples"),
        (points(2.0, 1.0, batch=64), [], False, "did not report the losses by examples"),
    ],
)
def test_the_loss_follows_that_of_the_rung_before(
    here: list[RungLoss], before: list[RungLoss], passes: bool, words: str
) -> None:
    gates = Gates.model_validate(OFF | {"lossFollows": {"tolerance": "0.05"}})
    (result,) = judge(gates, STEPS, measurement(), Pace(900.0, CHIPS), BEFORE, compare(here, before))
    assert result.passed is passes
    assert words in result.message


@pytest.mark.parametrize(
    "curve",
    [
        {"steps": [1, 2], "losses": [1.0], "errors": [0.1, 0.1]},
        {"steps": [2, 1], "losses": [1.0, 1.0], "errors": [0.1, 0.1]},
        {"steps": [0], "losses": [1.0], "errors": [0.1]},
        {"steps": [], "losses": [], "errors": []},
    ],
)
def test_a_curve_that_is_not_in_order_is_none(curve: dict[str, Any]) -> None:
    assert loss_points(ReportedCurve.model_validate(curve), 8) == []


def test_the_loss_of_a_step_counts_in_the_middle_of_its_batch() -> None:
    curve = ReportedCurve(steps=[1, 4], losses=[2.0, 1.0], errors=[0.1, 0.2])
    assert loss_points(curve, 8) == [
        RungLoss(examples=4, loss="2", error="0.1"),
        RungLoss(examples=28, loss="1", error="0.2"),
    ]


def test_without_a_rung_before_there_is_no_efficiency() -> None:
    passed, message = judge_one({"minEfficiency": "0.1"}, measurement(), before=None)
    assert not passed
    assert "of the one before" in message


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"rung": None},
        {"rung": []},
        {
            "rung": {
                "firstLoss": "2",
                "lastLoss": True,
                "errorsFallen": "9",
                "rise": [],
                "recompilations": 1.5,
                "notFinite": None,
            }
        },
        {
            "rung": {
                "firstLoss": float("nan"),
                "lastLoss": float("-inf"),
                "errorsFallen": float("inf"),
                "recompilations": 2**70,
            }
        },
        {"rung": {"findings": {"Padding": "many", "HostSync": []}}, "metrics": [1], "step": "1"},
        {"metrics": {"loss": None, "f1": "0.9", "big": 10**400}, "examplesPerSecond": "fast"},
        {"metrics": {"f1": float("inf")}, "rung": {"evaluated": ["f1"]}, "examplesPerSecond": float("inf")},
    ],
)
def test_no_message_of_another_form_passes(message: Any) -> None:
    measured = read_last_words(json.dumps(message))
    gates = Gates.model_validate({"minEfficiency": "0.01", "evaluation": {"metric": "f1", "min": "0"}})
    pace = Pace(measured.rate, 1)
    assert not any(result.passed for result in judge(gates, STEPS, measured, pace, BEFORE))


def test_a_rung_that_ended_early_has_not_shown_the_rest() -> None:
    first, *_ = judge(Gates(), STEPS, measurement(step=12), Pace(1.0, 1), None)
    assert str(first).startswith("steps failed: ")
    assert "12 steps of 40" in str(first)
