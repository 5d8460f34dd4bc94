"""Numbers that need not be whole: what is written is what is computed with."""

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.jobs import job_body
from tpu_training_operator.api.decimals import number_in, put_numbers_for_texts, readable, text_of
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import parse_job


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (0.1, "0.1"),
        ("3e-4", "0.0003"),
        (3e-4, "0.0003"),
        ("0001.50E+02", "150"),
        (1, "1"),
        (1.0, "1"),
        (-0.0, "0"),
        (5e-5, "0.00005"),
        (1e-10, "0.0000000001"),
        (1e-13, "1e-13"),
        (0.30000000000000004, "0.30000000000000004"),
        (1e22, "1e+22"),
        *((value, None) for value in (True, None, math.nan, math.inf, "nan", "1e400", "0x1", "", "1" * 2000, 10**400)),
    ],
)
def test_a_number_is_read_as_it_is_written(written: object, text: str | None) -> None:
    assert text_of(written) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0.000000000008", "8e-12"),
        ("0.00000001", "1e-8"),
        ("0.00000125", "0.00000125"),
        ("0.000000999", "9.99e-7"),
        ("0.10", "0.1"),
        ("150", "150"),
        ("1e+22", "10000000000000000000000"),
        ("0", "0"),
    ],
)
def test_a_number_is_shown_in_few_digits(text: str, shown: str) -> None:
    assert readable(text) == shown


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_that_is_shown_is_the_number(number: float) -> None:
    text = text_of(number)
    assert text is not None
    assert float(readable(text)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_number_changes_on_its_way_through_json_and_text(number: float) -> None:
    text = text_of(orjson.loads(orjson.dumps(number)))
    assert text is not None
    assert float(text) == number
    assert (text_of(text), text_of(orjson.loads(orjson.dumps(number_in(text))))) == (text, text)


def test_a_job_may_have_numbers_as_text_and_is_submitted_with_numbers() -> None:
    changes: dict[str, Any] = {
        "spec.recipe.optimizer": {"name": "sgd", "learningRate": "5e-2", "momentum": "0.90"},
        "spec.recipe.parameters": {"rate": "0.1"},
        "spec.ladder.rungs": [
            {
                "slice": {"acceleratorType": "v5litepod-8"},
                "steps": 10,
                "gates": {"evaluation": {"metric": "f1", "min": "1"}},
            }
        ],
    }
    body = job_body(changes)
    before = parse_job(body)
    assert list(put_numbers_for_texts(TPUTrainingJob, body)) == [
        ("spec.ladder.rungs[0].gates.evaluation.min", "1"),
        ("spec.recipe.optimizer.learningRate", "5e-2"),
        ("spec.recipe.optimizer.momentum", "0.90"),
    ]
    assert body["spec"]["recipe"]["optimizer"] == {"name": "sgd", "learningRate": 0.05, "momentum": 0.9}
    assert body["spec"]["recipe"]["parameters"] == {"rate": "0.1"}
    assert parse_job(body).spec == before.spec
