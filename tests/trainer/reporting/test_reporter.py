"""The reporter: what it leaves behind, where, and that no trouble with it is the run's."""

from __future__ import annotations

import json
import math
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.checkpoint.stores import MemoryStore
from tests.trainer.gang_processes import DEADLINE, run_spec
from tpu_contract.protocol import HISTORY_FILE, ExitCode, Phase
from tpu_contract.run_spec import RunSpec, parse_run_spec
from tpu_trainer.contract.clock import Clock
from tpu_trainer.contract.errors import BadSpecError, StorageError
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting import reporter as module
from tpu_trainer.reporting.history import FirstLossTime, Sample
from tpu_trainer.reporting.reporter import EVERY_SECONDS, Reporter, open_reporter
from tpu_trainer.task.logbook import LoggedCurve

DONE = Outcome(ExitCode.Succeeded, "trained 20 steps", 20)


def spec_of(attempt: int = 1, **report: Any) -> RunSpec:
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": attempt}
    return parse_run_spec(run_spec(job=job, report=report))


def sample(step: int, count: int = 10) -> Sample:
    losses = tuple(1 / done for done in range(step - count + 1, step + 1))
    split = {Phase.INPUT: 0.5, Phase.DEVICE: 1.5}
    return Sample(step, losses, 0.25, 2.0, split, examples_per_second=80.0, mfu=0.4, noise_scale=32.0)


def recorded_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / HISTORY_FILE).read_bytes())["recorded"]


def test_a_run_leaves_its_history(tmp_path: Path) -> None:
    reporter = open_reporter(spec_of(uri=str(tmp_path)), None, Clock(), "cpu", reports=True)
    reporter.add_finding(Finding("Padding", 0, "pad less"))
    reporter.begin(0)
    for step in (10, 20):
        reporter.add_sample(sample(step))
    reporter.add_evaluation(20, {"accuracy": 0.875})
    reporter.add_finding(Finding("InputBound", 20, "read ahead more"))
    reporter.end(DONE)

    document = json.loads((tmp_path / HISTORY_FILE).read_bytes())
    assert document["outcome"] == {"code": "Succeeded", "message": "trained 20 steps"}
    assert document["runSpec"] == run_spec(job=document["runSpec"]["job"], report={"uri": str(tmp_path)})
    assert document["environment"]["Device"] == "cpu"
    history = recorded_in(tmp_path)
    assert [point["step"] for point in history["losses"]] == list(range(1, 21))
    assert [evaluation["metrics"] for evaluation in history["evaluations"]] == [{"accuracy": 0.875}]
    assert [warned["message"] for warned in history["warnings"]] == ["pad less", "read ahead more"]


def test_the_next_attempt_continues_the_history_of_the_last(tmp_path: Path) -> None:
    for attempt, start, end, code in ((1, 0, 30, ExitCode.Preempted), (2, 20, 40, ExitCode.Succeeded)):
        reporter = open_reporter(spec_of(attempt, uri=str(tmp_path)), None, Clock(), "cpu", reports=True)
        reporter.begin(start)
        reporter.add_first_loss(FirstLossTime(40.0 / attempt, 2, 12.5))
        for step in range(start + 10, end + 10, 10):
            reporter.add_sample(sample(step))
            reporter.add_curves([LoggedCurve("accuracy", ((step, attempt),))])
        reporter.end(Outcome(code, "ended", end))

    history = recorded_in(tmp_path)
    assert [point["step"] for point in history["losses"]] == list(range(1, 41))
    (logged,) = history["logged"]
    assert [(point["step"], point["mean"]) for point in logged["points"]] == [(10, 1), (20, 1), (30, 2), (40, 2)]
    assert [(a["number"], a["first"], a["last"], a["outcome"]) for a in history["attempts"]] == [
        (1, 0, 30, "Preempted"),
        (2, 20, 40, "Succeeded"),
    ]
    assert [a["first_loss"]["seconds"] for a in history["attempts"]] == [40.0, 20.0]


def test_a_run_that_fails_before_its_first_step_keeps_what_earlier_attempts_left(tmp_path: Path) -> None:
    first = open_reporter(spec_of(1), tmp_path, Clock(), "cpu", reports=True)
    first.begin(0)
    first.add_sample(sample(10))
    first.end(Outcome(ExitCode.PeerLost, "a peer went away", 10))
    second = open_reporter(spec_of(2), tmp_path, Clock(), "cpu", reports=True)
    second.end(Outcome(ExitCode.StorageFailed, "no such bucket"))

    history = recorded_in(tmp_path)
    assert len(history["losses"]) == 10
    assert [(a["first"], a["last"], a["outcome"]) for a in history["attempts"]] == [
        (0, 10, "PeerLost"),
        (10, 10, "StorageFailed"),
    ]
    assert json.loads((tmp_path / HISTORY_FILE).read_bytes())["outcome"]["message"] == "no such bucket"


def test_a_gang_that_was_cut_off_leaves_the_history_of_its_successor_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_off, successor = (
        open_reporter(spec_of(n, uri=str(tmp_path)), None, Clock(), "cpu", reports=True) for n in (1, 2)
    )
    for reporter in (cut_off, successor):
        reporter.begin(0)
        reporter.add_sample(sample(10))
    cut_off.add_sample(sample(20))
    successor.end(Outcome(ExitCode.Preempted, "told to stop", 10))
    cut_off.end(DONE)

    assert [attempt["number"] for attempt in recorded_in(tmp_path)["attempts"]] == [2]
    assert "of this job writes it now" in capsys.readouterr().err


def test_the_run_specs_place_comes_before_the_environments(tmp_path: Path) -> None:
    reporter = open_reporter(spec_of(uri=str(tmp_path / "there")), tmp_path / "here", Clock(), "cpu", reports=True)
    reporter.end(DONE)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_invalid_place_is_an_error_of_the_run_spec() -> None:
    with pytest.raises(BadSpecError, match=r"^report\.uri: "):
        open_reporter(spec_of(uri="ftp://there"), None, Clock(), "cpu", reports=True)


@pytest.mark.parametrize("reports", [True, False])
def test_without_a_place_or_on_another_replica_nothing_is_made(tmp_path: Path, reports: bool) -> None:
    reporter = open_reporter(spec_of(), None if reports else tmp_path, Clock(), "cpu", reports=reports)
    reporter.begin(0)
    reporter.add_sample(sample(10))
    reporter.add_evaluation(10, {"accuracy": 0.5})
    reporter.end(DONE)
    assert list(tmp_path.iterdir()) == []


class SlowStore(MemoryStore):
    """Lets writes through while `open` is set; says when one was `asked` for, and when a version was `written`. `only`:
    the one file that waits, by default all."""

    def __init__(self, only: str | None = None) -> None:
        super().__init__()
        self._only = only
        self.versions = 0
        self.open, self.asked, self.written = threading.Event(), threading.Event(), threading.Event()

    def put(self, name: str, data: bytes) -> None:
        self.asked.set()
        assert self._only not in (None, name) or self.open.wait(DEADLINE)
        super().put(name, data)
        self.versions += 1
        self.written.set()


class BrokenStore(MemoryStore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def put(self, name: str, data: bytes) -> None:
        raise self._error

    def read(self, name: str) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    "error", [StorageError("gs://b/c: permission denied"), RuntimeError("token expired\nlong story")]
)
def test_trouble_with_the_store_is_one_line_and_never_an_error_of_the_run(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(spec_of(), BrokenStore(error), Clock(), {})
    reporter.begin(0)
    reporter.add_sample(sample(10))
    reporter.end(DONE)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("report: ")
    assert str(error).partition("\n")[0] in said


def test_during_a_run_the_history_is_written_every_few_minutes() -> None:
    time, store = [0.0], SlowStore()
    store.open.set()
    reporter = Reporter(spec_of(), store, Clock(), {}, now=lambda: time[0])
    reporter.begin(0)
    reporter.add_sample(sample(10))
    assert not store.asked.is_set()
    time[0] += EVERY_SECONDS
    reporter.add_sample(sample(20))
    assert store.written.wait(DEADLINE)
    assert json.loads(store.objects[HISTORY_FILE])["outcome"] is None


def test_a_slow_store_delays_no_step_and_still_gets_the_end() -> None:
    time, store = [0.0], SlowStore()
    reporter = Reporter(spec_of(), store, Clock(), {}, now=lambda: time[0])
    reporter.begin(0)
    for step in (10, 20, 30):
        time[0] += EVERY_SECONDS
        reporter.add_sample(sample(step))
    assert store.asked.wait(DEADLINE)
    assert store.objects == {}
    store.open.set()
    reporter.end(DONE)
    assert json.loads(store.objects[HISTORY_FILE])["outcome"]["code"] == "Succeeded"
    assert store.versions == 2


def test_a_store_that_hangs_does_not_keep_the_worker_from_leaving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
    store = SlowStore()
    reporter = Reporter(spec_of(), store, Clock(), {})
    reporter.end(DONE)
    assert "not written within" in capsys.readouterr().err
    store.open.set()
    assert store.written.wait(DEADLINE)


def test_a_profile_that_is_not_uploaded_is_said_and_keeps_no_history_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
    store = SlowStore(only="host.trace")
    reporter = Reporter(spec_of(), store, Clock(), {})
    reporter.add_profile({"host.trace": b"x"}, "steps 6 to 8")
    reporter.end(DONE)
    assert "the profile is not written within" in capsys.readouterr().err
    assert store.written.wait(DEADLINE)
    assert list(store.objects) == [HISTORY_FILE]
    store.open.set()


def events(content: bytes) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every scalar of an event file."""
    return [(step, value.tag, value.simple_value) for step, value in summaries(content)]


def summaries(content: bytes) -> list[tuple[int, Any]]:
    """The values of an event file with their steps, its checksums checked."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        sums = struct.unpack("<II", content[8:12] + content[12 + length : 16 + length])
        assert sums == (masked_crc32c(content[:8]), masked_crc32c(data))
        event = Event.FromString(data)
        found += [(event.step, value) for value in event.summary.value]
        content = content[16 + length :]
    return found


def test_event_files_hold_every_loss_and_the_rates_of_every_sample(tmp_path: Path) -> None:
    reporter = open_reporter(spec_of(tensorBoard=True), tmp_path, Clock(), "cpu", reports=True)
    reporter.begin(0)
    reporter.add_sample(replace(sample(2, count=2), gradient_norms=(3.0, 4.0)))
    reporter.add_curves([LoggedCurve("accuracy", ((1, 0.25), (2, 0.5)))])
    reporter.add_evaluation(2, {"accuracy": 0.875})
    reporter.end(DONE)

    (file,) = tmp_path.glob("events.out.tfevents.*")
    assert events(file.read_bytes()) == [
        (1, "loss", 1.0),
        (2, "loss", 0.5),
        (1, "gradient norm", 3.0),
        (2, "gradient norm", 4.0),
        (2, "recipe/learning rate", 0.25),
        (2, "speed/examples per second", 80.0),
        (2, "speed/step milliseconds", 1000.0),
        (2, "speed/waiting for input", 0.25),
        (2, "speed/model flops utilisation", pytest.approx(0.4)),
        (2, "recipe/gradient noise scale", 32.0),
        (1, "training/accuracy", 0.25),
        (2, "training/accuracy", 0.5),
        (2, "evaluation/accuracy", 0.875),
    ]


def test_event_files_take_losses_that_are_not_finite_or_too_large(tmp_path: Path) -> None:
    reporter = open_reporter(spec_of(tensorBoard=True), tmp_path, Clock(), "cpu", reports=True)
    reporter.add_sample(Sample(3, (math.nan, -math.inf, 1e300), 0.1, 1.0, {}))
    reporter.end(DONE)

    (file,) = tmp_path.glob("events.out.tfevents.*")
    values = [value for _, tag, value in events(file.read_bytes()) if tag == "loss"]
    assert math.isnan(values[0])
    assert values[1:] == [-math.inf, math.inf]


def test_event_files_are_written_only_on_request(tmp_path: Path) -> None:
    reporter = open_reporter(spec_of(), tmp_path, Clock(), "cpu", reports=True)
    reporter.add_sample(sample(10))
    reporter.end(DONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [HISTORY_FILE]
