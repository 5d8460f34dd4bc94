"""The table of the slice check between trainer and operator, whoever wrote it."""

import json

import pytest

from tpu_contract.slice_check import (
    LONGEST_WORD,
    MOST_ENTRIES,
    MOST_LINES,
    SLICE_CHECK_MARKER,
    ExpectedChips,
    LineVerdict,
    SliceCheckLine,
    SliceSection,
    SliceTable,
    expected_from_json,
    expected_to_json,
    find_slice_check,
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
TABLE = SliceTable((OK, FAILED), {"pod": 0.5}, {"torch": "2.9.0"}, "v5litepod-16", complete=True)


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
        (SliceTable((OK,), complete=True), True),
        (SliceTable((OK,)), False),
        (SliceTable((SliceCheckLine(SliceSection.RUN, "steps", LineVerdict.NOT_TRIED),), complete=True), True),
    ],
)
def test_a_table_passes_that_is_complete_and_has_no_failed_line(check: SliceTable, passed: bool):
    assert check.passed is passed


def test_the_last_table_of_a_log_counts():
    log = f"begin\n{SLICE_CHECK_MARKER}{to_json(SliceTable())}\n2026 {SLICE_CHECK_MARKER}{to_json(TABLE)}\nend\n"
    assert find_slice_check(log) == TABLE


def test_a_log_without_a_table_has_none():
    assert find_slice_check("trained 20 steps\n") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        "{",
        "[" * 100_000,
        '{"lines": 3, "seconds": [], "versions": "x"}',
        '{"lines": [null, 3, {}, {"section": "Pod"}, {"section": [], "verdict": {}}]}',
        '{"seconds": {"pod": NaN, "chips": 1e999, "run": true, "net": ' + "9" * 400 + "}}",
        json.dumps({"x": "y" * (5 << 20)}),
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
    entries = {str(number): "x" for number in range(1000)}
    document = {
        "lines": json.loads(to_json(SliceTable((long,))))["lines"] * 600,
        "versions": entries,
        "seconds": dict.fromkeys(entries, 1),
    }
    read = from_json(json.dumps(document))
    assert len(read.lines) == MOST_LINES
    assert len(read.versions) == len(read.seconds) == MOST_ENTRIES
    assert len(read.lines[0].name) == len(read.lines[0].measured) == LONGEST_WORD


def test_failed_lines_are_kept_when_a_table_is_cut():
    many = SliceTable((*[OK] * MOST_LINES, FAILED), complete=True)
    assert from_json(to_json(many)).failed == (FAILED,)


def test_what_is_expected_of_chips_survives_the_way():
    chips = ExpectedChips("v5litepod-16", 4, 1, 197.0, 819.0, 200.0)
    assert expected_from_json(expected_to_json(chips)) == chips


@pytest.mark.parametrize(
    "text", ["", "[]", '{"chips_per_host": "4", "bf16_tflops": -1, "hbm_gb_per_second": 1e999, "colour": 1}']
)
def test_what_is_unreadable_is_unknown(text: str):
    assert expected_from_json(text) == ExpectedChips()
