"""What a report says, how it is written, and when the next one is sent."""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.gang_processes import DEADLINE, run_spec
from tests.trainer.progress_service import Answer, ProgressService, Request, progress_service
from tpu_contract.protocol import MOST_WARNINGS, REPORT_LIMIT, STACKS_LIMIT, ExitCode, Phase, ReportPhase
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract import environment
from tpu_trainer.contract.clock import Clock, StepPace
from tpu_trainer.contract.environment import read_environment
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting import heartbeat as module
from tpu_trainer.reporting.heartbeat import EVERY_SECONDS, LONGEST_SECONDS, Endpoint, Pauses, RefusedError, stacks
from tpu_trainer.reporting.history import Sample
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.report import ProgressReport, kubeflow_body, operator_body, phase_of, present_report
from tpu_trainer.task.logbook import LoggedCurve

PHASES = [
    (Phase.START, 0, ReportPhase.STARTING),
    (Phase.INPUT, 0, ReportPhase.STARTING),
    (Phase.DEVICE, 0, ReportPhase.STARTING),
    (Phase.DEVICE, 2, ReportPhase.STARTING),
    (Phase.DEVICE, 3, ReportPhase.TRAINING),
    (Phase.INPUT, 3, ReportPhase.TRAINING),
    (Phase.HOST, 3, ReportPhase.TRAINING),
    (Phase.CHECKPOINT, 0, ReportPhase.CHECKPOINTING),
    (Phase.CHECKPOINT, 3, ReportPhase.CHECKPOINTING),
    (Phase.EVALUATE, 3, ReportPhase.EVALUATING),
]


def test_the_phase_is_the_clocks_but_the_first_steps_belong_to_the_start() -> None:
    assert [phase_of(phase, steps) for phase, steps, _ in PHASES] == [reported for *_, reported in PHASES]


def report_of(*told: Sample | Finding, steps: int = 0, checkpoint_step: int | None = None) -> ProgressReport:
    """Of a run of 100 steps of 16 examples."""
    pace, progress = StepPace(), ProgressLog(100, silent=True)
    for step in range(1, steps + 1):
        pace.step_done(step)
    for each in told:
        progress.add_sample(each) if isinstance(each, Sample) else progress.add_finding(each)
    progress.checkpoint_step = checkpoint_step
    return present_report(parse_run_spec(run_spec(trainSteps=100)), Clock(), pace, progress)


def sample(step: int, rate: float | None = None) -> Sample:
    return Sample(step, (0.75, 0.5), 0.1, 1.0, {}, examples_per_second=rate)


def test_before_the_first_step_nothing_is_known() -> None:
    assert report_of() == ProgressReport(ReportPhase.STARTING, 0, 100, metrics={})


def test_the_step_is_the_newest_and_not_the_last_samples() -> None:
    told = report_of(sample(10), steps=17)
    assert (told.step, told.loss) == (17, 0.5)


def test_a_continued_run_reports_the_step_of_its_checkpoint() -> None:
    progress = ProgressLog(100, silent=True)
    progress.resume(40, "continues")
    told = present_report(parse_run_spec(run_spec(trainSteps=100)), Clock(), StepPace(), progress)
    assert (told.step, told.checkpoint_step, told.phase) == (40, 40, ReportPhase.STARTING)


def test_the_metrics_of_an_evaluation_come_before_what_was_logged_and_replace_it() -> None:
    progress = ProgressLog(100, silent=True)
    progress.add_curves([LoggedCurve("accuracy", ((1, 0.25), (2, 0.5))), LoggedCurve("norm", ((2, math.nan),))])
    progress.add_evaluation(2, {"top5": 0.75, "accuracy": 0.875})
    metrics = present_report(parse_run_spec(run_spec()), Clock(), StepPace(), progress).metrics
    assert list(metrics) == ["top5", "accuracy", "norm"]
    assert (metrics["top5"], metrics["accuracy"]) == (0.75, 0.875)
    assert math.isnan(metrics["norm"])


def test_the_remaining_time_follows_from_the_rate() -> None:
    assert report_of(sample(10), steps=20).remaining_seconds is None
    assert report_of(sample(10, rate=64.0), steps=20).remaining_seconds == 20


def test_only_the_first_warnings_are_reported() -> None:
    warnings = report_of(*[Finding("Padding", 1, f"warning {n}") for n in range(30)]).warnings
    assert warnings == tuple(f"warning {n}" for n in range(MOST_WARNINGS))


reports = st.builds(
    ProgressReport,
    phase=st.sampled_from(ReportPhase),
    step=st.integers(0, 10),
    total_steps=st.integers(10, 20),
    loss=st.none() | st.floats(),
    examples_per_second=st.none() | st.floats(),
    checkpoint_step=st.none() | st.integers(0, 10),
    metrics=st.dictionaries(st.text(max_size=5) | st.just("a" * 10_000), st.floats(), max_size=80),
    warnings=st.lists(
        st.text(max_size=5) | st.sampled_from(["\ud800", "a" * 5_000, "\U0001f600" * 2_000]), max_size=20
    ).map(tuple),
    remaining_seconds=st.none() | st.integers(0, 10),
    stacks=st.none() | st.text(max_size=5) | st.just("\n" * STACKS_LIMIT),
)


def strictly(body: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(body.decode(), parse_constant=refuse)


@given(reports)
def test_a_body_is_json_of_bounded_length_whatever_it_reports(report: ProgressReport) -> None:
    body = operator_body(report)
    assert len(body) <= REPORT_LIMIT
    said = json.loads(body.decode())
    assert (said["phase"], said["step"]) == (report.phase, report.step)


@given(reports)
def test_kubeflow_trainer_gets_what_its_schema_wants(report: ProgressReport) -> None:
    status = strictly(kubeflow_body(report, datetime(2026, 1, 1, 12, tzinfo=UTC)))["trainerStatus"]
    assert (status["progressPercentage"] == 100) == (report.phase is ReportPhase.DONE)
    assert 0 <= status["progressPercentage"] <= 100
    assert all(type(metric["value"]) is str and metric["value"] for metric in status["metrics"])
    assert status["lastUpdatedTime"] == "2026-01-01T12:00:00Z"


OWN = {
    "TPUJOB_PROGRESS_URL": "https://operator/own",
    "TPUJOB_PROGRESS_TOKEN_FILE": "/own/token",
    "TPUJOB_PROGRESS_CA_FILE": "/own/ca.crt",
}
KUBEFLOW = {
    "KUBEFLOW_TRAINER_SERVER_URL": "https://kubeflow/status",
    "KUBEFLOW_TRAINER_SERVER_TOKEN": "/kubeflow/token",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/kubeflow/ca.crt",
}


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, None),
        (OWN, "https://operator/own"),
        (OWN | KUBEFLOW, "https://operator/own"),
        (KUBEFLOW, "https://kubeflow/status"),
        (OWN | {"TPUJOB_PROGRESS_CA_FILE": ""}, None),
        (KUBEFLOW | {"KUBEFLOW_TRAINER_SERVER_TOKEN": ""}, None),
    ],
)
def test_reports_go_to_the_operator_or_else_to_kubeflow_trainer_if_all_names_are_set(
    environ: dict[str, str], url: str | None
) -> None:
    service = read_environment({"TPUJOB_RUN_SPEC": "run.json", **environ}).progress_service
    assert (service and service.url) == url
    assert service is None or service.kubeflow == ("kubeflow" in service.url)


# When.


def test_while_reports_fail_the_pauses_grow_up_to_a_minute() -> None:
    pauses = Pauses()
    failed = ConnectionRefusedError()
    assert [pauses.after(failed) for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    assert [pauses.after(None), pauses.after(failed)] == [EVERY_SECONDS, 5]
    for _ in range(2000):
        pauses.after(failed)
    assert pauses.after(failed) == LONGEST_SECONDS


@pytest.mark.parametrize(("asked", "pause"), [(None, 5), (0, 5), (17, 17), (3600, 60)])
def test_a_pause_that_the_service_asks_for_is_kept_within_limits(asked: int | None, pause: float) -> None:
    assert Pauses().after(RefusedError("429 too many reports", asked)) == pause


# How.


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ProgressService]:
    with progress_service(tmp_path) as service:
        yield service


@pytest.fixture
def endpoint(service: ProgressService) -> Iterator[Endpoint]:
    url = service.environment["TPUJOB_PROGRESS_URL"]
    endpoint = Endpoint(environment.ProgressEndpoint(url, service.token_file, service.ca_file))
    yield endpoint
    endpoint.close()


def test_a_connection_is_kept_for_the_next_report(service: ProgressService, endpoint: Endpoint) -> None:
    for _ in range(3):
        assert endpoint.post(b"{}", 60.0) == {"stacks": False}
    assert len({request.client for request in service.requests}) == 1


@pytest.mark.parametrize("headers", [(), (("Connection", "close"),)], ids=["unsaid", "said"])
def test_a_connection_that_the_service_closed_is_opened_again(
    service: ProgressService, endpoint: Endpoint, headers: tuple[tuple[str, str], ...]
) -> None:
    service.answer = lambda request: Answer(headers=headers)
    endpoint.post(b"{}", 60.0)
    service.stop()
    service.start()
    # With a new certificate, which the old connection knows nothing of.
    endpoint.post(b"{}", 60.0)
    assert len({request.client for request in service.requests}) == 2


def test_a_refusal_has_the_services_message(service: ProgressService, endpoint: Endpoint) -> None:
    service.answer = lambda request: Answer(429, b'{"message": "one a second"}', (("Retry-After", "7"),))
    with pytest.raises(RefusedError, match=r"^429 one a second$") as refused:
        endpoint.post(b"{}", 60.0)
    assert refused.value.retry_after == 7


def test_a_refusal_by_another_server_shows_its_status(service: ProgressService, endpoint: Endpoint) -> None:
    for body in (b"<html>", b"[]", b"\xff"):
        answer = Answer(502, body, (("Retry-After", "Sat, 21 Nov 2026 20:00:00 GMT"),))
        service.answer = lambda request, answer=answer: answer
        with pytest.raises(RefusedError, match=r"^502 Bad Gateway$") as refused:
            endpoint.post(b"{}", 60.0)
        assert refused.value.retry_after is None


def test_an_answer_that_is_too_long_does_not_disturb_the_next(service: ProgressService, endpoint: Endpoint) -> None:
    service.answer = lambda request: Answer(body=b" " * 1_000_000)
    assert endpoint.post(b"{}", 60.0) is None
    service.answer = lambda request: Answer()
    assert endpoint.post(b"{}", 60.0) == {"stacks": False}


def test_the_token_goes_only_to_a_server_that_the_certificate_names(
    service: ProgressService, endpoint: Endpoint
) -> None:
    other = service.environment["TPUJOB_PROGRESS_URL"].replace("localhost", "127.0.0.1")
    stranger = Endpoint(environment.ProgressEndpoint(other, service.token_file, service.ca_file))
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.post(b"{}", 60.0)
    assert service.requests == []


# Trouble.


@pytest.fixture
def collected() -> Iterator[None]:
    """Python's ssl leaves a socket to the garbage collector if the other end resets it before TLS begins."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_a_report_for_which_there_is_no_token_leaves_no_connection_open(
    service: ProgressService, endpoint: Endpoint
) -> None:
    endpoint.post(b"{}", DEADLINE)
    before = len(os.listdir("/proc/self/fd"))
    service.token_file.unlink()
    with pytest.raises(FileNotFoundError):
        endpoint.post(b"{}", DEADLINE)
    assert len(os.listdir("/proc/self/fd")) < before


def is_not_trusted(service: ProgressService) -> None:
    before = service.ca_file.read_bytes()
    service.stop()
    service.start()
    service.ca_file.write_bytes(before)


def hangs(service: ProgressService) -> None:
    def answer(request: Request) -> Answer:
        released.wait(DEADLINE)
        return Answer()

    released = threading.Event()
    service.answer = answer


def answers(status: int, body: bytes) -> Callable[[ProgressService], None]:
    return lambda service: setattr(service, "answer", lambda request: Answer(status, body))


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        pytest.param(lambda service: service.stop(), "ConnectionRefusedError: ", id="gone"),
        pytest.param(answers(500, b'{"message": "the log says why"}'), "500 the log says why", id="failing"),
        pytest.param(answers(403, b'{"message": "not your job"}'), "403 not your job", id="refusing"),
        pytest.param(is_not_trusted, "SSLCertVerificationError: ", id="another certificate"),
        pytest.param(lambda service: service.token_file.unlink(), "FileNotFoundError: ", id="no token"),
        pytest.param(lambda service: service.ca_file.unlink(), "FileNotFoundError: ", id="no certificate"),
        pytest.param(hangs, "TimeoutError: ", id="hanging"),
    ],
)
@pytest.mark.usefixtures("collected")
def test_any_trouble_with_the_service_is_one_line_and_reports_continue(
    trouble: Callable[[ProgressService], None],
    reason: str,
    service: ProgressService,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, seconds in (("EVERY_SECONDS", 0.01), ("LONGEST_SECONDS", 0.02), ("TIMEOUT_SECONDS", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    attempts = Attempts()
    trouble(service)
    url = service.environment["TPUJOB_PROGRESS_URL"]
    place = environment.ProgressEndpoint(url, service.token_file, service.ca_file)
    heartbeat = module.open_heartbeat(place, attempts)
    assert heartbeat is not None
    attempts.wait_for(4)
    heartbeat.end(Outcome(ExitCode.UserError, "the run ends"))
    said = capsys.readouterr().err
    assert said.startswith("progress reports: ")
    assert reason in said
    assert said.endswith("the training is not affected\n")
    assert said.count("\n") == 1


class Attempts:
    """The state of a run; counts how often it was asked for."""

    def __init__(self) -> None:
        self._asked = threading.Semaphore(0)

    def __call__(self) -> ProgressReport:
        self._asked.release()
        return ProgressReport(ReportPhase.TRAINING, 1, 100)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._asked.acquire(timeout=DEADLINE)


# Stacks.


def test_stacks_are_the_end_of_all_threads() -> None:
    release = threading.Event()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            started.release()
            release.wait()

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=deep, args=(150,)) for _ in range(20)]
    for thread in threads:
        thread.start()
        started.acquire()
    text = stacks()
    release.set()
    for thread in threads:
        thread.join()
    assert len(text.encode()) == STACKS_LIMIT
    # This thread is the main one, and began before all others.
    assert "in test_stacks_are_the_end_of" in text


def test_the_log_has_the_newest_numbers_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLog(40, silent=False)
    progress.add_sample(Sample(20, (0.75, 0.5), 0.1, 1.0, {}, examples_per_second=900.5))
    progress.add_evaluation(20, {"accuracy": 0.75})
    assert capsys.readouterr().out.splitlines() == [
        "step 20/40: loss 0.5, 900.5 examples/s",
        "step 20/40: accuracy 0.75",
    ]
