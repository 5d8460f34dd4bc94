"""The table of the slice check between trainer and operator, whoever wrote it."""

import json

import pytest

from tpu_contract.slice_check import (
    LONGEST_WORD,
    MOST_LINES,
    MOST_PHASES,
    ExpectedChips,
    LineVerdict,
    SliceCheckLine,
    SliceSection,
    SliceTable,
    expected_from_json,
    expected_to_json,
    from_json,
    to_json,
)

OK = SliceCheckLine(SliceSection.POD, "memlock", LineVerdict.OK, "8 MiB", number=8.0, unit="MiB")
FAILED = SliceCheckLine(
    SliceSection.NETWORK,
    "port 8476",
    LineVerdict.FAILED,
    "timed out",
    "open",
    host="job-1-0-1",
    node="node-7",
    advice="let the pods of a job reach each other",
)
TABLE = SliceTable((OK, FAILED), {"pod": 0.5})


def test_the_table_survives_the_way():
    assert from_json(to_json(TABLE)) == TABLE


def test_a_failed_line_names_host_and_node_in_one_sentence():
    assert str(FAILED) == (
        "job-1-0-1 on node-7: port 8476: timed out, expected open; let the pods of a job reach each other"
    )


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (TABLE, False),
        (SliceTable((OK,)), True),
        (SliceTable(), False),
        (SliceTable((SliceCheckLine(SliceSection.RUN, "steps", LineVerdict.NOT_TRIED),)), True),
    ],
)
def test_a_table_passes_that_has_lines_and_no_failed_one(check: SliceTable, passed: bool):
    assert check.passed is passed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        "{",
        "[" * 100_000,
        '{"lines": 3, "seconds": []}',
        '{"lines": [null, 3, {}, {"section": "Pod"}, {"section": [], "verdict": {}}]}',
        '{"seconds": {"pod": NaN, "chips": 1e999, "run": true, "net": ' + "9" * 400 + "}}",
    ],
)
def test_what_is_no_table_is_an_empty_one(text: str):
    assert from_json(text) == SliceTable()


def test_unknown_fields_are_ignored_and_wrong_ones_left_out():
    document = {"section": "Pod", "verdict": "Ok", "name": "memlock", "measured": 3, "number": "8", "colour": "red"}
    assert from_json(json.dumps({"lines": [document], "colour": 1})).lines == (
        SliceCheckLine(SliceSection.POD, "memlock", LineVerdict.OK),
    )


def test_a_huge_table_is_cut():
    long = SliceCheckLine(SliceSection.POD, "a\nb" * 1000, LineVerdict.OK, "ü" * 10_000)
    seconds = {str(number): 1 for number in range(1000)}
    document = {"lines": json.loads(to_json(SliceTable((long,))))["lines"] * 600, "seconds": seconds}
    read = from_json(json.dumps(document))
    assert len(read.lines) == MOST_LINES
    assert len(read.seconds) == MOST_PHASES
    assert len(read.lines[0].name) == len(read.lines[0].measured) == LONGEST_WORD


def test_failed_lines_are_kept_when_a_table_is_cut():
    many = SliceTable((*[OK] * MOST_LINES, FAILED))
    assert from_json(to_json(many)).failed == (FAILED,)


def test_what_is_expected_of_chips_survives_the_way():
    chips = ExpectedChips("v5litepod-16", 4, 1, 197.0, 819.0, 200.0)
    assert expected_from_json(expected_to_json(chips)) == chips


@pytest.mark.parametrize("text", ["", "[]", '{"colour": 1}'])
def test_what_is_unreadable_is_unknown(text: str):
    assert expected_from_json(text) == ExpectedChips()
