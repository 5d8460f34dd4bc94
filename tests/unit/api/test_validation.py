"""What is refused, where, and with which message. `tpujob` and the status show the same messages."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.unit.bad_jobs import BAD_JOBS, DOUBLED, IMPOSSIBLE_JOBS
from tests.unit.good_jobs import GOOD_JOBS
from tests.unit.jobs import ABSENT, job_body
from tpu_training_operator.api.constants import RESERVED_ENV
from tpu_training_operator.api.slice import V2_NEEDS_CPU
from tpu_training_operator.api.validation import InvalidJob, Problem, parse_job
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.job.rungs import lower_rungs_of


def problems(body: dict[str, Any]) -> list[Problem]:
    with pytest.raises(InvalidJob) as caught:
        parse_job(body)
    return caught.value.problems


def arithmetic_problems(changes: dict[str, Any]) -> list[Problem]:
    valid = parse_job(job_body(changes))
    with pytest.raises(InvalidJob) as caught:
        resolve(valid.spec), lower_rungs_of(valid)
    return caught.value.problems


@pytest.mark.parametrize(("changes", "field"), BAD_JOBS)
def test_a_wrong_field_is_reported(changes: dict[str, Any], field: str) -> None:
    assert field in [problem.field for problem in problems(job_body(changes))]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"spec.run_policy": {"suspend": True}}, "spec.run_policy"),
        ({"spec.recipe.globalBatchSize": ABSENT, "spec.recipe.global_batch_size": 32}, "spec.recipe.global_batch_size"),
        (
            {"spec.runPolicy": {"restart": {"limits": [{"failure_class": "Hang", "max": 1}]}}},
            "spec.runPolicy.restart.limits[0].failure_class",
        ),
    ],
)
def test_a_field_has_its_api_name_only(changes: dict[str, Any], field: str) -> None:
    """The API server knows no other, so `tpujob` must not accept one."""
    wrong = [problem.field for problem in problems(job_body(changes))]
    assert field in wrong


@pytest.mark.parametrize(("changes", "field"), DOUBLED)
def test_what_is_listed_twice_is_named(changes: dict[str, Any], field: str) -> None:
    [problem] = problems(job_body(changes))
    assert (problem.field, problem.message.endswith(" is listed twice")) == (field, True)


@pytest.mark.parametrize(("changes", "field"), IMPOSSIBLE_JOBS)
def test_what_cannot_be_computed_is_reported_the_same_way(changes: dict[str, Any], field: str) -> None:
    assert [problem.field for problem in arithmetic_problems(changes)] == [field]


def test_every_report_says_what_would_be_right(snapshot: SnapshotAssertion) -> None:
    reports = [(changes, problems(job_body(changes))) for changes, _ in BAD_JOBS]
    reports += [(changes, arithmetic_problems(changes)) for changes, _ in IMPOSSIBLE_JOBS]
    lines = [
        line for changes, report in reports for line in (str(changes)[:200], *(f"  {problem}" for problem in report))
    ]
    assert "\n".join(lines) == snapshot


@pytest.mark.parametrize("topology", ["5001x1x1", "999x999x999", "9999x9999x9999"])
def test_a_slice_with_far_too_many_hosts_is_refused_in_one_sentence(topology: str) -> None:
    changes = {"spec.slice": {"generation": "tpu8t", "topology": topology, "chipsPerHost": 1}}
    [problem] = problems(job_body(changes | {"metadata.name": "a" * 48}))
    assert problem.field == "spec.slice"
    assert "can have at most 5000" in problem.message


def test_every_problem_is_one_line() -> None:
    every = [str(problem) for changes, _ in BAD_JOBS for problem in problems(job_body(changes))]
    assert [text for text in every if "\n" in text] == []


@pytest.mark.parametrize("words", ["a\nb", "\x1b[2Jb", "b" * 5000])
@pytest.mark.parametrize("field", ["trainer", "trainer.command", "checkpoint", "checkpoint.uri", "slice.a"])
def test_what_a_message_quotes_is_one_short_line(field: str, words: str) -> None:
    for problem in problems(job_body({f"spec.{field}": f"c/{words}"})):
        assert problem.message.isprintable()
        assert len(problem.message) <= 1000


@pytest.mark.parametrize("name", [*RESERVED_ENV, "TPUJOB_", "TPUJOB_ANYTHING"])
def test_users_cannot_set_what_the_operator_torch_xla_or_libtpu_sets(name: str) -> None:
    [problem] = problems(job_body({"spec.trainer.env": [{"name": name, "value": "x"}]}))
    assert problem.field == "spec.trainer.env"
    assert problem.message.endswith(f": {name}")


def test_all_problems_are_reported_at_once() -> None:
    changes = {"spec.slice.count": 0, "spec.trainer.image": ABSENT, "spec.recipe.optimizer.learningRate": "x"}
    assert {problem.field for problem in problems(job_body(changes))} == {
        "spec.slice.count",
        "spec.trainer.image",
        "spec.recipe.optimizer.learningRate",
    }


@pytest.mark.parametrize("changes", GOOD_JOBS)
def test_a_valid_job_is_accepted(changes: dict[str, Any]) -> None:
    assert parse_job(job_body(changes)).kind == "TPUTrainingJob"


def test_the_status_is_not_validated() -> None:
    assert parse_job(job_body({"status": {"whatever": 1}})).kind == "TPUTrainingJob"


def test_a_job_on_v2_can_be_read_if_no_cluster_has_to_accept_it() -> None:
    body = job_body({"spec.slice.acceleratorType": "v2-8"})
    assert parse_job(body, except_rules=(V2_NEEDS_CPU,)).spec.slice.accelerator_type == "v2-8"


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (
    "apiVersion",
    "metadata",
    "metadata.name",
    "spec",
    "spec.slice",
    "spec.slice.acceleratorType",
    "spec.trainer.env",
    "spec.trainer.resources",
    "spec.trainer.volumes",
    "spec.recipe.tunedOn",
    "spec.recipe.optimizer.learningRate",
    "spec.recipe.parameters",
    "spec.runPolicy",
    "spec.surprise",
)


@given(field=st.sampled_from(_FIELDS), value=_ANYTHING)
def test_any_value_anywhere_is_accepted_or_refused_as_invalid(field: str, value: object) -> None:
    with contextlib.suppress(InvalidJob):
        parse_job(job_body({field: value}))


@given(prefix=st.sampled_from(["v4-", "v5litepod-", "v9-", ""]), rest=st.text(max_size=8))
def test_any_accelerator_type_is_accepted_or_refused_with_alternatives(prefix: str, rest: str) -> None:
    try:
        parse_job(job_body({"spec.slice.acceleratorType": prefix + rest}))
    except InvalidJob as invalid:
        message = str(invalid)
    else:
        message = "nearest: none is needed"
    assert "nearest: " in message or "such as " in message
