"""Text from other programs: no terminal control in it reaches a status, an event or a table."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.pods import ended_pod
from tests.unit.hostile_texts import HOSTILE, SHOWN, obeyed
from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tpu_training_operator.api.conditions import Condition, EventReason
from tpu_training_operator.api.status import Failure, Progress, Status
from tpu_training_operator.api.text import plain, plain_json
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.runtime.events import event_body

texts = st.text(st.characters(exclude_categories=())) | st.text(
    st.sampled_from("\x00\x07\x1b\x7f\x90\x9b\x9c\x9d[]\\;0mc\r\n\t \u202e\u2069\ud800é")
)


@given(texts)
def test_no_text_keeps_what_a_terminal_obeys(text: str) -> None:
    kept = plain(text)
    kinds = {unicodedata.category(character) for character in kept if character not in "\n\t"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not re.search("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]", kept)
    kept.encode()


@given(texts)
def test_plain_text_is_unchanged(text: str) -> None:
    assert plain(plain(text)) == plain(text)


@given(texts)
def test_no_text_gets_longer(text: str) -> None:
    assert len(plain(text)) <= len(text)


@given(st.text(st.characters(exclude_categories=("Cc", "Cs", "Cf", "Zl", "Zp")) | st.sampled_from("\n\t")))
def test_what_people_write_is_kept(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("\x1b[31mValueError\x1b[0m: bad", "ValueError: bad"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]52;c;cHduZWQ=\x1b\\after", "after"),
        ("\x1b]0;never ends", "0;never ends"),
        ("\x1b[2", "2"),
        ("10%\r20%\r\ndone", "10%\n20%\ndone"),
        ("a\tb\n", "a\tb\n"),
        ("\u200fעברית\u200e", "עברית"),
        ("loss\u2028step 7\u2029", "loss\nstep 7\n"),
        ("pass\u200bword\u200d s\ufeff", "password s"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("family 👨‍👩‍👧", "family 👨‍👩‍👧"),
        ("half \ud83d", "half ?"),
    ],
)
def test_what_remains_of_a_text(given: str, kept: str) -> None:
    assert plain(given) == kept


def test_a_json_value_becomes_plain_including_its_names() -> None:
    assert plain_json({"a\x1b": ["b\x07", {"c": 1.5, "d": None}, True]}) == {"a": ["b", {"c": 1.5, "d": None}, True]}


@pytest.mark.parametrize("message", [HOSTILE, '{"outcome": "UserError", "message": "\\u001b[2J\\u009b2J\\ud800"}'])
def test_last_words_are_plain(message: str) -> None:
    assert obeyed(ended_pod(1, message).last_words) == []


def test_everything_in_a_status_or_an_event_is_plain() -> None:
    status = Status(
        conditions=[
            Condition(
                type="Ready", status="False", last_transition_time="2026-01-01T00:00:00Z", reason="A", message=HOSTILE
            )
        ],
        progress=Progress(step=1, total_steps=2, loss="nan", metrics={HOSTILE: "1"}, warnings=[HOSTILE, "well"]),
        last_failure=Failure.read(
            {
                "attempt": 1,
                "pod": HOSTILE,
                "node": HOSTILE,
                "slice": 0,
                "host": 0,
                "class": "Unknown",
                "reason": HOSTILE,
                "message": HOSTILE,
                "time": "2026-01-01T00:00:00Z",
            }
        ),
        avoided_nodes=[HOSTILE],
    )
    body = str(status.as_json())
    assert body.count(SHOWN) + body.count("up\\ndown") >= 6
    assert obeyed(body) == []
    assert Status.read(status.as_json()) == status
    assert obeyed(event_body(Event(EventReason.FAILED, HOSTILE), job_body(), NOON)["note"]) == []
