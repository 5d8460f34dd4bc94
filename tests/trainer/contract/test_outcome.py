"""How a worker ends: one outcome per host, and a termination message within Kubernetes' limit."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st

from tpu_contract.protocol import TERMINATION_MESSAGE_LIMIT, ExitCode
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.outcome import Outcome, host_outcome, outcome_of, termination_message

# Surrogates and control characters included: a traceback may quote any string.
texts = st.text(st.characters(), max_size=50).flatmap(lambda text: st.integers(1, 400).map(lambda times: text * times))


@given(message=texts)
def test_any_message_becomes_valid_json_within_the_limit(message: str) -> None:
    encoded = termination_message(Outcome(ExitCode.UserError, message, step=7))
    assert len(encoded) <= TERMINATION_MESSAGE_LIMIT
    document = json.loads(encoded)
    assert (document["outcome"], document["step"]) == ("UserError", 7)


@given(message=texts)
def test_a_long_message_loses_its_beginning_and_no_more_than_needed(message: str) -> None:
    encoded = termination_message(Outcome(ExitCode.UserError, message))
    kept = json.loads(encoded)["message"]
    whole = message.encode("utf-8", "replace").decode()
    if kept != whole:
        assert whole.endswith(kept.removeprefix("... "))
        # One more character costs at most six bytes, as an escape.
        assert len(encoded) > TERMINATION_MESSAGE_LIMIT - 6


def test_the_last_lines_of_a_long_traceback_stay() -> None:
    traceback = "\n".join(f'  File "model.py", line {i}, in forward' for i in range(500)) + "\nValueError: shapes"
    kept = json.loads(termination_message(Outcome(ExitCode.UserError, traceback)))["message"]
    assert kept.endswith("in forward\nValueError: shapes")
    assert "499" in kept


def test_metrics_that_fill_the_message_alone_are_dropped_from_the_end_and_the_message_names_them() -> None:
    metrics = {f"metric_{i}": i / 7 for i in range(1000)}
    encoded = termination_message(Outcome(ExitCode.Succeeded, "trained", 10, metrics))
    assert len(encoded) <= TERMINATION_MESSAGE_LIMIT
    document = json.loads(encoded)
    kept = len(document["metrics"])
    assert list(document["metrics"]) == list(metrics)[:kept]
    names = ", ".join(list(metrics)[kept : kept + 3])
    assert document["message"].startswith(f"trained; {1000 - kept} metrics ")
    assert document["message"].endswith(f": {names} and {997 - kept} more")


def test_metrics_that_have_room_need_no_words() -> None:
    document = json.loads(termination_message(Outcome(ExitCode.Succeeded, "trained", 10, {"loss": 0.5})))
    assert (document["message"], document["metrics"]) == ("trained", {"loss": 0.5})


def test_metrics_of_an_evaluation_are_dropped_with_their_names() -> None:
    metrics = {f"{index:03}{'x' * 60}": 0.5 for index in range(40)}
    rung = {"evaluated": list(metrics), "findings": {"InputBound": 1}}
    encoded = termination_message(Outcome(ExitCode.Succeeded, "trained", 10, metrics, rung=rung))
    assert len(encoded) <= TERMINATION_MESSAGE_LIMIT
    document = json.loads(encoded)
    assert document["message"].startswith(f"trained; {40 - len(document['metrics'])} metrics have no room here")
    assert len(document["metrics"]) > 0
    assert document["rung"]["evaluated"] == list(document["metrics"]) == list(metrics)[: len(document["metrics"])]


def test_a_diverged_loss_is_null_because_json_has_no_nan() -> None:
    outcome = Outcome(ExitCode.Succeeded, "trained", 10, {"loss": math.nan, "accuracy": 0.1})
    assert json.loads(termination_message(outcome))["metrics"] == {"loss": None, "accuracy": 0.1}


def test_numbers_not_reached_are_absent() -> None:
    assert json.loads(termination_message(Outcome(ExitCode.BadSpec, "seed: missing"))) == {
        "outcome": "BadSpec",
        "message": "seed: missing",
    }


@pytest.mark.parametrize(
    ("codes", "died", "expected"),
    [
        ([ExitCode.Succeeded, ExitCode.Succeeded], False, ExitCode.Succeeded),
        ([ExitCode.Preempted, ExitCode.Preempted], False, ExitCode.Preempted),
        ([ExitCode.PeerLost, ExitCode.UserError], True, ExitCode.UserError),
        ([ExitCode.BadSpec], True, ExitCode.BadSpec),
        ([ExitCode.Succeeded], True, ExitCode.InternalError),
        ([], True, ExitCode.InternalError),
    ],
)
def test_a_host_ends_with_the_most_telling_outcome_of_its_chips(
    codes: list[ExitCode], died: bool, expected: ExitCode
) -> None:
    assert host_outcome([Outcome(code, "") for code in codes], died).code is expected


def test_torchs_own_checkpointing_on_xla_is_told_what_works_there() -> None:
    with pytest.raises(UserCodeError) as raised, user_code("the task's loss"):
        torch.utils.checkpoint._get_device_module("xla")
    message = outcome_of(raised.value).message
    assert "'torch' has no attribute" in message
    assert message.splitlines()[-1].startswith("torch.utils.checkpoint does")
