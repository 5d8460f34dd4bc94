"""A loop of the user's own with `tpu_trainer.callbacks`: agreeing to stop, reports, last words and exit codes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.trainer import fork_server
from tests.trainer.gang_processes import ON_XLAS_CPU, ROOT, Launcher, run_spec
from tests.trainer.progress_service import progress_service
from tests.trainer.recorded import recorded
from tpu_contract.protocol import ExitCode
from tpu_trainer.callbacks import Session, session
from tpu_trainer.callbacks.ending import outcome_of_loop
from tpu_trainer.callbacks.run import REPORT_EVERY, Losses, place_on_host
from tpu_trainer.callbacks.stop import MOST_AHEAD, Agreement, count_xla_devices, steps_ahead
from tpu_trainer.contract.errors import BadSpecError, NotFiniteError
from tpu_trainer.contract.outcome import Outcome, write_last_words
from tpu_trainer.reporting import heartbeat


class Meeting:
    """The store of a gang, in memory."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        return self._values.setdefault(key, desired).encode()


@given(
    told_at=st.lists(st.none() | st.integers(1, 40), min_size=2, max_size=5).filter(any),
    order=st.randoms(use_true_random=False),
    stride=st.sampled_from([1, 10]),
    seconds=st.sampled_from([0.0, 0.01, 0.3, 30.0]),
)
def test_all_processes_stop_after_the_same_step_whoever_was_told_and_when(
    told_at: list[int | None], order: Any, stride: int, seconds: float
) -> None:
    """Of processes that are less than one step apart, in any order within the step."""
    store, step = Meeting(), 0
    told = [False] * len(told_at)
    gang = [Agreement(lambda rank=rank: told[rank], None, lambda: store) for rank in range(len(told_at))]
    first = min(when for when in told_at if when is not None)
    stopped: list[bool] = [False]
    while not any(stopped):
        step += stride
        stopped = []
        for rank in order.sample(range(len(gang)), len(gang)):
            when = told_at[rank]
            told[rank] = when is not None and step >= when
            stopped.append(gang[rank].reached(step, seconds))
    assert all(stopped)
    assert step > first or stride > 1
    assert step - first <= MOST_AHEAD + 2 * stride


def test_a_process_that_calls_alone_waits_for_no_other() -> None:
    alone = Agreement(lambda: True, None, Meeting)
    assert [alone.reached(step, 0.0) for step in (1, 2)] == [False, True]


def test_a_single_process_stops_at_once() -> None:
    assert Agreement(lambda: True, None, lambda: None).reached(1, 0.0)


def test_the_users_own_way_to_agree_is_asked_in_every_step() -> None:
    asked: list[bool] = []

    def agree(told: bool) -> bool:
        asked.append(told)
        return len(asked) == 3

    agreement = Agreement(lambda: False, agree, Meeting)
    assert [agreement.reached(step, 0.0) for step in (1, 2, 3)] == [False, False, True]
    assert asked == [False, False, False]


def test_a_store_that_is_gone_is_not_a_request_to_stop() -> None:
    class Gone(Meeting):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    assert not Agreement(lambda: False, None, Gone).reached(1, 0.0)


def test_slow_steps_stop_at_the_next_one_and_fast_ones_a_second_ahead() -> None:
    assert [steps_ahead(seconds) for seconds in (0.0, 60.0, 0.25, 1e-9)] == [1, 1, 4, MOST_AHEAD]


def test_without_a_job_nothing_happens_and_torch_is_not_imported() -> None:
    code = (
        "import sys; from tpu_trainer.callbacks import session\n"
        "with session(10) as run:\n"
        "    for step in range(1, 4):\n"
        "        run.step(step, float('nan'), metrics={'accuracy': 1})\n"
        "        with run.saving(), run.evaluating(): run.checkpoint(step)\n"
        "        assert not run.should_stop and not run.in_job\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("TPUJOB_")}
    env["PYTHONPATH"] = str(ROOT / "trainer_image")
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The environment of the only worker of a job with trainer.command; `run.json` may be written again."""
    write_spec(tmp_path)
    for name, value in {
        "TPUJOB_RUN_SPEC": "run.json",
        "TPUJOB_TERMINATION_LOG": "words",
        "TPUJOB_REPORT_DIRECTORY": "",
    }.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    handler, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
    yield tmp_path
    assert signal.getsignal(signal.SIGTERM) == handler
    # A session that went well listens for what fails after it.
    assert sys.excepthook == hook or words(tmp_path)["outcome"] in ("Succeeded", "UserError")
    sys.excepthook = hook


def write_spec(directory: Path, **changes: Any) -> None:
    document = run_spec(trainSteps=20, **changes)
    del document["entrypoint"]
    (directory / "run.json").write_text(json.dumps(document))


def words(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "words").read_bytes())


def warnings(directory: Path) -> list[str]:
    return [finding["message"] for finding in recorded(directory).document["warnings"]]


def test_a_whole_run_leaves_its_result_its_curve_and_its_history(job: Path) -> None:
    with session() as run:
        for step in range(1, 21):
            run.step(step, torch.tensor(1 / step), learning_rate=step / 100)
            if step % 10 == 0:
                run.evaluated(step, {"accuracy": torch.tensor(step / 20), "confusion": torch.zeros(2, 2)})
                run.checkpoint(step)
    said = words(job)
    assert (said["outcome"], said["step"]) == ("Succeeded", 20)
    assert said["metrics"] == pytest.approx({"loss": 1 / 20, "accuracy": 1.0})
    assert said["examplesPerSecond"] > 0
    assert said["checkpointStep"] == 20
    assert recorded(job).losses == pytest.approx([1 / step for step in range(1, 21)])
    history = json.loads((job / "history.json").read_text())
    assert history["outcome"]["code"] == "Succeeded"
    assert [stretch["steps"] for stretch in history["recorded"]["stretches"]] == [REPORT_EVERY] * 2
    rates = history["recorded"]["rates"]["points"]
    assert [(each["step"], each["rate"]) for each in rates] == [(step, step / 100) for step in range(1, 21)]


def test_a_metric_named_loss_does_not_take_the_training_losss_place(job: Path) -> None:
    with session() as run:
        for step in range(1, 21):
            run.step(step, 1 / step)
        run.evaluated(20, {"loss": 7.0, "accuracy": 1.0})
    assert words(job)["metrics"] == pytest.approx({"loss": 1 / 20, "evaluation_loss": 7.0, "accuracy": 1.0})
    assert 'the metric "loss" is called' in warnings(job)[0]


def test_a_loss_that_is_told_every_few_steps_stands_for_all_of_them(job: Path) -> None:
    with session() as run:
        for step in range(1, 21):
            run.step(step)
            if step % 5 == 0:
                run.record(step, step / 5)
    assert recorded(job).losses == [float(-(-step // 5)) for step in range(1, 21)]


def test_the_operator_hears_of_steps_phases_and_checkpoints(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_SECONDS", 0.05)
    with progress_service(job) as service:
        for name, value in {**service.environment, **service.kubeflow_environment}.items():
            monkeypatch.setenv(name, value)
        with session(7, global_batch_size=64) as run:
            for step in range(1, 5):
                run.step(step, 0.5)
            # Else Hugging Face's own callback would report beside this one.
            assert "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ
            run.checkpoint(4)
            with run.evaluating():
                service.wait_for(lambda said: said["phase"] == "Evaluating")
        last = service.wait_for(lambda said: said["phase"] == "Done")
    assert (last["step"], last["totalSteps"], last["checkpointStep"], last["loss"]) == (4, 7, 4, 0.5)


@pytest.mark.parametrize(
    ("hosts", "joined", "backend", "agree", "warning"),
    [
        (2, 1, "torch", None, "torch.distributed joins no processes"),
        (4, 2, "torch", None, "torch.distributed joins 2 processes"),
        (2, 4, "torch", None, None),
        (1, 1, "torch", None, None),
        (2, 1, "torch", lambda told: told, None),
        (2, 0, "xla", None, "torch_xla joins no devices"),
        (2, 4, "xla", None, "torch_xla joins 4 devices"),
        (2, 8, "xla", None, None),
        (2, None, "xla", None, None),
        (1, 0, "xla", None, None),
    ],
    ids=[
        "alone",
        "half",
        "a process per chip",
        "one host",
        "joined by the user",
        "chips that rest",
        "the chips of one host",
        "a whole slice",
        "a release that does not say",
        "one host on its CPU",
    ],
)
def test_hosts_that_train_apart_get_a_warning(
    hosts: int,
    joined: int | None,
    backend: str,
    agree: Any,
    warning: str | None,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_spec(job, hosts=hosts, replicas=4 * hosts, backend=backend)
    for name, value in {"NUM_HOSTS": str(hosts), "HOST_INDEX": "0"}.items():
        monkeypatch.setenv(f"TPUJOB_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr("tpu_trainer.callbacks.run.world_size", lambda: joined)
    monkeypatch.setattr("tpu_trainer.callbacks.run.count_xla_devices", lambda: joined)
    with session(agree=agree) as run:
        run.step(20, 0.5)
    assert [text.partition(",")[0] for text in warnings(job)] == ([] if warning is None else [warning])


def test_one_program_over_all_devices_joins_all_of_them(launcher: Launcher) -> None:
    """With SPMD torch_xla counts a process as one."""
    environ = {**ON_XLAS_CPU, "CPU_NUM_DEVICES": "4"}
    said = launcher.run_alone("tests.trainer.spmd_devices", fork_server.XLA, **environ)
    assert said.splitlines()[-1] == "0 4"


@pytest.mark.parametrize("release", [{}, {"_XLAC": SimpleNamespace()}])
def test_a_release_of_torch_xla_that_does_not_say_what_it_joins_ends_no_loop(
    release: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(**release))
    assert count_xla_devices() is None


@pytest.mark.parametrize(
    ("length", "steps", "warns"), [(None, 20, False), (None, 8, True), (None, 21, True), (8, 7, False)]
)
def test_a_loop_of_another_length_than_the_recipes_gets_a_warning(
    length: int | None, steps: int, warns: bool, job: Path
) -> None:
    with session(length) as run:
        for step in range(1, steps + 1):
            run.step(step, 0.5)
    assert [text.partition(":")[0] for text in warnings(job)] == [
        f"the loop ended after step {steps}, and the recipe has 20 steps"
    ] * warns


@pytest.mark.parametrize("resumed_at", [None, 7, 20])
def test_a_session_without_a_step_succeeds_with_a_warning_unless_all_was_done_before(
    resumed_at: int | None, job: Path
) -> None:
    with session() as run:
        if resumed_at is not None:
            run.checkpoint(resumed_at)
    assert words(job)["outcome"] == "Succeeded"
    assert ["without a step" in text for text in warnings(job)] == [True] * (resumed_at != 20)


@pytest.mark.parametrize("leaves", ["the loop", "the program"])
def test_told_to_stop_it_ends_with_the_documented_code_and_what_was_saved(job: Path, leaves: str) -> None:
    def interrupted() -> None:
        with session() as run:
            for step in range(1, 21):
                run.step(step, 0.5)
                if step == 3:
                    assert not run.should_stop
                    os.kill(os.getpid(), signal.SIGTERM)
                if run.should_stop:
                    run.checkpoint(step)
                    if leaves == "the program":
                        sys.exit(0)
                    break

    with pytest.raises(SystemExit) as end:
        interrupted()
    assert (end.value.code, words(job)["outcome"], words(job)["step"]) == (75, "Preempted", 4)
    assert words(job)["checkpointStep"] == 4


def test_the_loop_of_the_examples_continues_from_its_checkpoint(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here, so that a lane that runs other tests does not import sklearn.
    from examples import own_loop

    monkeypatch.delenv("RANK", raising=False)

    def train(steps: int, folder: str) -> dict[str, Any]:
        document = json.loads((job / "run.json").read_text()) | {"trainSteps": steps}
        (job / "run.json").write_text(json.dumps(document))
        monkeypatch.setenv("TPUJOB_CHECKPOINT_URI", str(job / folder))
        own_loop.main()
        assert (words(job)["outcome"], words(job)["step"]) == ("Succeeded", steps)
        return torch.load(job / folder / "last.pt")

    train(10, "in two parts")
    twice, once = train(20, "in two parts"), train(20, "at once")
    assert twice["step"] == once["step"] == 20
    torch.testing.assert_close(twice["net"], once["net"], rtol=0, atol=0)
    assert words(job)["metrics"]["accuracy"] > 0.3


def test_the_loop_of_the_examples_trains_outside_of_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples import own_loop

    for name in ("RANK", "TPUJOB_RUN_SPEC", "TPUJOB_CHECKPOINT_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(own_loop.LAPTOP, "trainSteps", 100)
    own_loop.main()
    assert float(capsys.readouterr().out.splitlines()[-1].partition("accuracy ")[2]) > 0.9


def test_a_loss_that_is_not_finite_ends_the_run_or_is_a_warning(job: Path, snapshot: SnapshotAssertion) -> None:
    def broken() -> None:
        with session() as run:
            for step in range(1, 21):
                run.step(step, math.nan if step in (7, 20) else 0.5)

    with pytest.raises(SystemExit) as end:
        broken()
    assert (end.value.code, words(job)["outcome"], words(job)["step"]) == (65, "NotFinite", 7)
    assert "step 7" in words(job)["message"]
    assert "recipe.onNotFinite" in words(job)["message"]
    assert words(job)["message"] == snapshot
    write_spec(job, onNotFinite="Warn")
    (job / "words").unlink()
    broken()
    assert warnings(job) == ["the loss of step 7 is nan"]


def test_a_step_may_be_numpys_or_torchs_number(job: Path) -> None:
    with session(total_steps=2) as run:
        run.step(np.int64(1), np.float32(0.5))  # type: ignore[arg-type]
        run.checkpoint(np.int64(1))  # type: ignore[arg-type]
        run.step(torch.tensor(2), torch.tensor(0.5))  # type: ignore[arg-type]
        run.evaluated(torch.tensor(2), {"accuracy": np.float32(0.25)})  # type: ignore[arg-type]
    assert (words(job)["step"], words(job)["metrics"]) == (2, {"loss": 0.5, "accuracy": 0.25})
    assert words(job)["checkpointStep"] == 1


def test_a_program_that_leaves_by_sys_exit_is_judged_by_its_last_losses_too(job: Path) -> None:
    def broken() -> None:
        with session(total_steps=3) as run:
            for step in range(1, 4):
                run.step(step, math.nan if step == 3 else 0.5)
            sys.exit(0)

    with pytest.raises(SystemExit) as end:
        broken()
    assert (end.value.code, words(job)["outcome"], words(job)["step"]) == (65, "NotFinite", 3)


def test_the_users_error_goes_its_own_way_and_leaves_its_traceback(job: Path) -> None:
    def mistaken() -> None:
        with session() as run:
            run.step(1, 0.5)
            raise KeyError("label")

    with pytest.raises(KeyError):
        mistaken()
    said = words(job)
    assert (said["outcome"], said["step"]) == ("UserError", 1)
    assert said["message"].endswith("KeyError: 'label'")
    assert "test_callbacks.py" in said["message"]


def test_an_error_outside_of_the_block_is_heard_by_callbacks_too(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = session().begin()
    run.step(1, 0.5)
    error = NotFiniteError("the loss of step 1 is nan", 1)
    with pytest.raises(SystemExit) as end:
        sys.excepthook(NotFiniteError, error, None)
    assert (end.value.code, words(job)["outcome"]) == (65, "NotFinite")
    assert "the loss of step 1 is nan" in capsys.readouterr().err


def test_what_fails_after_the_training_is_heard_and_what_is_measured_there_is_in_the_result(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session() as run:
        run.step(20, 0.5)
    run.evaluated(20, {"accuracy": 0.75})
    assert words(job)["metrics"] == {"accuracy": 0.75, "loss": 0.5}
    assert recorded(job).evaluations == [{"accuracy": 0.75, "step": 20}]
    sys.excepthook(OSError, OSError("no space left for model.safetensors"), None)
    assert (words(job)["outcome"], words(job)["step"]) == ("UserError", 20)
    assert words(job)["message"].endswith("left for model.safetensors")
    assert "no space left" in capsys.readouterr().err


def leave_now(run: Session) -> None:
    os._exit(0)


def leave_in_a_thread(run: Session) -> None:
    threading.Thread(target=os._exit, args=(0,)).start()
    time.sleep(600)


def leave_when_told(run: Session) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)


def leave_after_the_end(run: Session) -> None:
    run.end()
    os._exit(0)


def leave_with_a_code(run: Session) -> None:
    os._exit(74)


@pytest.mark.parametrize(
    ("steps", "leave", "code", "outcome"),
    [
        (3, leave_now, 1, "UserError"),
        (0, leave_now, 1, "UserError"),
        (3, leave_in_a_thread, 1, "UserError"),
        (3, leave_when_told, 75, "Preempted"),
        (20, leave_now, 0, "Succeeded"),
        (3, leave_after_the_end, 0, "Succeeded"),
        (3, leave_with_a_code, 74, None),
    ],
)
def test_who_leaves_by_os_exit_within_a_session_has_succeeded_only_if_all_steps_are_made(
    steps: int, leave: Callable[[Session], None], code: int, outcome: str | None, job: Path
) -> None:
    def train() -> None:
        run = session().begin()
        for step in range(1, steps + 1):
            run.step(step, 0.5)
            # A worker of a DataLoader ends in this way, and says nothing about the training.
            assert in_a_fork(lambda: os._exit(0)) == 0
        leave(run)

    assert in_a_fork(train) == code
    assert (words(job)["outcome"] if (job / "words").exists() else None) == outcome
    if code in (1, 75):
        assert words(job)["message"].startswith("os._exit(0) ")
        assert f"after step {steps} of 20" in words(job)["message"]


def in_a_fork(run: Callable[[], None]) -> int:
    """The exit code of a process that does so; -9 if it does not leave by itself."""
    process = os.fork()
    if not process:
        with suppress(BaseException):
            run()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


class DistNetworkError(RuntimeError):
    """torch.distributed's, by name."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a shape"), ExitCode.UserError),
        (RuntimeError("a shape"), ExitCode.UserError),
        (RuntimeError(GLOO), ExitCode.PeerLost),
        (DistNetworkError("no answer"), ExitCode.PeerLost),
        (NotFiniteError("nan", 3), ExitCode.NotFinite),
        (KeyboardInterrupt(), ExitCode.UserError),
        (SystemExit(), ExitCode.Succeeded),
        (SystemExit(74), ExitCode.StorageFailed),
        (SystemExit(3), ExitCode.UserError),
        (SystemExit("no data"), ExitCode.UserError),
    ],
)
def test_what_an_exception_of_the_loop_means(error: BaseException, code: ExitCode) -> None:
    assert outcome_of_loop(error, 2).code is code


@pytest.mark.parametrize(
    ("outcomes", "kept"),
    [
        ([ExitCode.PeerLost, ExitCode.UserError], 1),
        ([ExitCode.UserError, ExitCode.PeerLost], 0),
        ([ExitCode.UserError, ExitCode.UserError], 0),
        ([ExitCode.Succeeded, ExitCode.Preempted], 1),
        ([ExitCode.Succeeded, ExitCode.Succeeded], 0),
    ],
)
def test_of_a_hosts_processes_the_one_that_says_most_has_the_last_word(
    outcomes: list[ExitCode], kept: int, tmp_path: Path
) -> None:
    for place, code in enumerate(outcomes):
        write_last_words(Outcome(code, f"process {place}"), first=place == 0, path=str(tmp_path / "words"))
    assert words(tmp_path)["message"] == f"process {kept}"


def test_the_result_is_the_first_processs_whichever_ends_last(tmp_path: Path) -> None:
    for place in (1, 0, 2):
        outcome = Outcome(ExitCode.Succeeded, f"process {place}", metrics={"loss": place})
        write_last_words(outcome, first=place == 0, path=str(tmp_path / "words"))
    assert words(tmp_path)["metrics"] == {"loss": 0}


def test_what_is_no_loss_is_refused_with_its_step(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValueError) as caught:
        Losses().add(3, torch.ones(2))
    assert "step 3" in str(caught.value)
    assert str(caught.value) == snapshot


def test_a_task_of_the_trainers_does_not_open_a_session(job: Path) -> None:
    (job / "run.json").write_text(json.dumps(run_spec()))
    with pytest.raises(BadSpecError, match="is for trainer"):
        session().begin()


def test_a_loss_on_a_device_is_read_when_the_next_one_is_there() -> None:
    class OnDevice(float):
        device = torch.device("meta")

    losses = Losses()
    losses.add(1, OnDevice(0.5))
    assert losses.read_earlier() == []
    losses.add(2, OnDevice(0.25))
    assert losses.read_earlier() == [(1, 0.5)]
    assert losses.read_all() == [(2, 0.25)]
    losses.add(3, 0.125)
    assert losses.read_earlier() == [(3, 0.125)]


@pytest.mark.parametrize(
    ("environ", "place"),
    [({}, 0), ({"LOCAL_RANK": "2"}, 2), ({"PJRT_LOCAL_PROCESS_RANK": "3"}, 3), ({"LOCAL_RANK": "none"}, 0)],
)
def test_the_place_on_the_host_is_what_the_launcher_says(environ: dict[str, str], place: int) -> None:
    assert place_on_host(environ) == place
