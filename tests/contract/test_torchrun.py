"""What torchrun writes at its end, by torch's own code, and what the operator makes of it."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.unit.kubelet_statuses import exited
from tests.unit.pods import at, seen
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.failures.first import first_failure

TRACEBACK = """Traceback (most recent call last):
  File "/app/train.py", line 7, in main
    row["label"]
KeyError: 'label'"""
AGENT = (
    "E1122 17:33:51.3 99 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0"
    " (pid: 41) of binary: /usr/bin/python\n"
    'Traceback (most recent call last):\n  File "/usr/bin/torchrun", line 10, in <module>\n    sys.exit(main())\n'
    "torch.distributed.elastic.multiprocessing.errors."
)


def torchrun_ends(*codes: int, says: str = "", records: Path | None = None) -> str:
    """The end of torchrun's output: `says` is what its processes printed, `records` the first one's error file."""
    failures = {rank: ProcessFailure(rank, 41 + rank, code, "") for rank, code in enumerate(codes)}
    if records is not None:
        failures[0] = ProcessFailure(0, 41, codes[0], str(records))
    for rank, failure in failures.items():
        failure.timestamp = 100 + rank
    return f"{says}\n{AGENT}ChildFailedError: {ChildFailedError('train.py', failures)}"


def failure_of(words: str, code: int = 1) -> Failure:
    found = first_failure(seen(exited(code, words)), 1, at(60), settle_user_errors=False)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("code", "failure_class", "reason", "exit_code"),
    [
        (1, "UserError", "UserError", 1),
        (65, "NotFinite", "NotFinite", 65),
        (75, "Preemption", "Preempted", 75),
        (-9, "Infrastructure", "Killed", 137),
        (-11, "Unknown", "Crashed", 139),
        (3, "Unknown", "ExitCode", 3),
    ],
)
def test_the_failure_is_that_of_the_process_that_failed_first(
    code: int, failure_class: str, reason: str, exit_code: int
) -> None:
    failure = failure_of(torchrun_ends(code, 1))
    assert (failure.failure_class, failure.reason, failure.exit_code) == (failure_class, reason, exit_code)


def test_a_traceback_above_its_closing_lines_is_what_happened() -> None:
    assert failure_of(torchrun_ends(1, says=TRACEBACK)).message == TRACEBACK


def test_of_several_tracebacks_it_is_that_of_the_rank_that_failed_first() -> None:
    other = TRACEBACK.replace("KeyError: 'label'", "RuntimeError: Connection closed by peer")
    mixed = [
        f"[rank{rank}]: {line}"
        for pair in zip(TRACEBACK.split("\n"), other.split("\n"), strict=True)
        for rank, line in enumerate(pair)
    ]
    assert failure_of(torchrun_ends(1, 1, says="\n".join(mixed))).message == TRACEBACK


def test_a_traceback_in_the_error_file_is_what_happened(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text(
        json.dumps(
            {"message": {"message": "KeyError: 'label'", "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1"}}}
        )
    )
    assert failure_of(torchrun_ends(1, records=file)).message == TRACEBACK


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, "rank 0 exited with code 1; its output is in the log, above torchrun's own lines"),
        (-9, "the worker was killed (exit code 137): rank 0 was ended by SIGKILL"),
    ],
)
def test_without_a_traceback_it_says_which_process_ended_and_how(code: int, message: str) -> None:
    assert failure_of(torchrun_ends(code)[-2048:]).message == message


def test_without_a_traceback_its_last_line_may_say_why() -> None:
    says = "usage: train.py [-h] [--epochs N]\ntrain.py: error: unrecognized arguments: --dist-backend gloo\n"
    failure = failure_of(torchrun_ends(2, 2, says=says))
    assert failure.exit_code == 2
    assert "code 2" in failure.message
    assert failure.message.endswith(": --dist-backend gloo")


def test_a_launcher_that_was_told_to_stop_was_ended_from_outside() -> None:
    words = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 40 got signal: 15"
    assert (failure_of(words).reason, failure_of(words).exit_code) == ("Killed", 143)


def test_the_outcome_in_the_last_words_outranks_the_launchers_exit_code() -> None:
    failure = failure_of(json.dumps({"outcome": "Preempted", "message": "stopped on request", "step": 7}))
    assert (failure.reason, failure.exit_code, failure.message) == ("Preempted", 75, "stopped on request")


def test_words_of_success_do_not_pass_for_the_cause_of_a_failure_after_the_training() -> None:
    failure = failure_of(json.dumps({"outcome": "Succeeded", "message": "trained 9 steps, loss 0.5", "step": 9}))
    assert failure.failure_class == "UserError"
    assert "exit code 1" in failure.message
    assert failure.message.endswith(": trained 9 steps, loss 0.5")


def test_an_exit_code_of_the_programs_own_is_believed() -> None:
    assert failure_of(json.dumps({"outcome": "Preempted", "message": "stopped"}), code=3).reason == "ExitCode"


def test_the_ranks_before_a_traceback_are_left_out() -> None:
    words = "\n".join(f"[rank3]: {line}" for line in TRACEBACK.split("\n"))
    assert failure_of(words).message == TRACEBACK
