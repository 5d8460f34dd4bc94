"""`tpujob watch`, `status` and `logs` as commands: output, exit status, and errors of the cluster."""

import copy
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from click.testing import CliRunner, Result
from kubernetes.config import kube_config
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from tests.cluster.deadlines import deadline
from tests.cluster.ports import free_port
from tests.fakes.api_server import refuses, status
from tests.fakes.watched_cluster import WatchedCluster, kubeconfig_for, served_in_thread
from tests.unit.histories import document, typical
from tests.unit.hostile_texts import HOSTILE, obeyed
from tests.unit.pods import pod, ready
from tests.unit.seen_jobs import JOBS, TRACEBACK, running_pods, seen_job
from tpu_training_operator.cli.main import main
from tpu_training_operator.cli.watch.display import Lines, display
from tpu_training_operator.kube import cluster as kinds


def plain_text(code: int, _: str, message: str) -> web.Response:
    return web.Response(status=code, text=message)


PROGRAM = "from tpu_training_operator.cli.main import main; main()"


@pytest.fixture
def cluster() -> Iterator[WatchedCluster]:
    with served_in_thread(WatchedCluster()) as started:
        yield started


@pytest.fixture
def kubeconfig(cluster: WatchedCluster, tmp_path: Path) -> Path:
    return kubeconfig_for(cluster.url, tmp_path / "config")


def show(cluster: WatchedCluster, stage: str) -> None:
    cluster.show(*JOBS[stage].bodies)


def tpujob(kubeconfig: Path, command: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, *arguments, "--kubeconfig", str(kubeconfig)])


def told(result: Result, code: int = 1) -> list[str]:
    """The lines on stderr; stdout is empty."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    return result.stderr.splitlines()


# report


def test_the_report_of_a_job_in_a_cluster_has_its_ladder(
    cluster: WatchedCluster, kubeconfig: Path, tmp_path: Path
) -> None:
    rung = {"slice": "v5litepod-4", "chips": 4, "replicas": 4, "globalBatchSize": 32, "learningRate": "0.05"}
    rungs = [rung | {"steps": 100, "verdict": "Passed", "attempt": 1, "examplesPerSecond": "904"}]
    (tmp_path / "history.json").write_bytes(document(typical()))
    cluster.show(seen_job(spec={"report": {"uri": "/mnt/reports"}}, ladder={"rung": 1, "of": 2, "rungs": rungs}))
    result = tpujob(kubeconfig, "report", str(tmp_path), "--job", "digits", "-o", str(tmp_path / "page.html"))
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'page.html'}\n")
    assert "The ladder" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_job_without_a_report_is_told_so(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    show(cluster, "running")
    assert told(tpujob(kubeconfig, "report", "--job", "digits")) == snapshot


def test_a_directory_that_a_job_names_is_not_read_on_this_machine(
    cluster: WatchedCluster, kubeconfig: Path, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "history.json").write_bytes(document(typical()))
    cluster.show(seen_job(spec={"report": {"uri": str(tmp_path)}}))
    [line] = told(tpujob(kubeconfig, "report", "--job", "digits"))
    assert line.endswith(f" report {tmp_path} --job digits")
    assert line == snapshot


# status


def test_status_shows_everything_about_one_job(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    show(cluster, "running")
    result = tpujob(kubeconfig, "status", "digits")
    assert (result.exit_code, result.stderr) == (0, "")
    first, *rest = [line.rstrip() for line in result.stdout.splitlines()]
    assert first == snapshot
    assert " hosts      4/4 ready" in rest
    assert any(line.startswith(" step       150/300 ") for line in rest)


@pytest.mark.parametrize(("output", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_status_prints_json_and_yaml(cluster: WatchedCluster, kubeconfig: Path, output: str, parse: Any) -> None:
    show(cluster, "restarting")
    found = parse(tpujob(kubeconfig, "status", "digits", "-o", output).stdout)
    assert found["status"] == JOBS["restarting"].job["status"]
    assert found["hosts"] == {
        "total": 4,
        "ready": 0,
        "finished": 0,
        "notReady": [{"why": "no pod yet", "hosts": ["0/0", "0/1", "0/2", "0/3"]}],
    }
    assert found["budgets"]["Infrastructure"] == {"restarts": 2, "counting": 0, "limit": 20}


def test_status_without_a_name_is_a_table(cluster: WatchedCluster, kubeconfig: Path) -> None:
    show(cluster, "running")
    other = seen_job("Succeeded")
    cluster.show({**other, "metadata": {**other["metadata"], "name": "letters"}})
    result = tpujob(kubeconfig, "status")
    header, first, second = [line.split() for line in result.stdout.splitlines()]
    assert header == ["NAME", "STATE", "SLICE", "HOSTS", "ATTEMPT", "STEP", "LEFT", "RESTARTS", "GOODPUT", "AGE"]
    assert first[:6] == ["digits", "Running", "v5litepod-16", "4", "1", "150/300"]
    assert second[:2] == ["letters", "Succeeded"]
    everywhere = tpujob(kubeconfig, "status", "-A").stdout.splitlines()
    assert [line.split()[0] for line in everywhere] == ["NAMESPACE", "default", "default"]
    assert [entry["name"] for entry in json.loads(tpujob(kubeconfig, "status", "-o", "json").stdout)] == [
        "digits",
        "letters",
    ]


def test_status_without_jobs_says_so(cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion) -> None:
    assert told(tpujob(kubeconfig, "status"), code=0) == snapshot


def test_status_refuses_a_name_together_with_all_namespaces(kubeconfig: Path) -> None:
    assert "give --namespace instead" in told(tpujob(kubeconfig, "status", "digits", "-A"), code=2)[-1]


def test_the_default_namespace_is_the_contexts(
    cluster: WatchedCluster, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    kubeconfig = kubeconfig_for(cluster.url, tmp_path / "config", namespace="team")
    assert told(tpujob(kubeconfig, "status"), code=0) == snapshot
    assert told(tpujob(kubeconfig, "status", "-n", "other"), code=0) == snapshot


# watch


def test_watch_exits_0_when_the_job_succeeds(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    show(cluster, "succeeded")
    result = tpujob(kubeconfig, "watch", "digits")
    assert (result.exit_code, result.stderr) == (0, "")
    line, metrics = result.stdout.splitlines()
    assert metrics.partition(" ")[2] == snapshot
    assert line.partition(" ")[2] == snapshot


def test_watch_exits_1_with_the_message_of_a_job_that_failed(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    show(cluster, "failed")
    result = tpujob(kubeconfig, "watch", "digits")
    assert result.exit_code == 1
    assert "digits-1-0-2" in result.stderr
    assert result.stderr == snapshot
    assert TRACEBACK in result.stderr


def test_without_a_terminal_only_changes_are_printed(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    lines = Lines()

    def printed(stage: str, trouble: str | None = None) -> list[str]:
        lines.show(JOBS[stage].view(), trouble)
        out, errors = capsys.readouterr()
        return (out + errors).splitlines()

    assert [line[:29] for line in printed("running")] == ["12:07:14 digits: Running, att"]
    assert printed("running") == []
    assert printed("running", "reset") == snapshot
    assert printed("running", "still down") == []
    assert [line[:29] for line in printed("restarting")] == [
        "12:13:15 digits: Restarting, ",
        "12:13:15   why: attempt 4 sta",
        "12:13:15   failure: Infrastru",
    ]


def test_on_a_terminal_the_table_is_redrawn_in_place() -> None:
    screen = io.StringIO()
    with display(Console(file=screen, force_terminal=True, width=80, height=30)) as shown:
        for stage in ("starting", "running"):
            shown.show(JOBS[stage].view(), None)
    assert "\x1b[2K" in screen.getvalue(), "lines are erased before they are drawn again"
    assert "1/4 ready" in screen.getvalue()
    assert "4/4 ready" in screen.getvalue()


def test_watch_reports_a_deleted_job(cluster: WatchedCluster, kubeconfig: Path) -> None:
    show(cluster, "running")

    async def deleted(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        event = {"type": "DELETED", "object": cluster.store.body(kinds.JOBS, "digits")}
        await response.write(json.dumps(event).encode() + b"\n")
        return response

    cluster.faults["watch tputrainingjobs"] = [deleted]
    result = tpujob(kubeconfig, "watch", "digits")
    assert (result.exit_code, result.stderr) == (1, "tpujob: digits was deleted\n")


@pytest.mark.parametrize("arguments", [["watch", "digits"], ["logs", "digits", "-f"]])
def test_an_interrupt_exits_quietly_with_130(cluster: WatchedCluster, kubeconfig: Path, arguments: list[str]) -> None:
    cluster.show(seen_job(), *running_pods())
    cluster.logs["digits-1-0-0"] = b"2026-01-15T12:00:00.1Z here\n"
    # A shell's background job, which a test run may be, has its interrupts ignored, and its children inherit that.
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {PROGRAM}"
    command = [sys.executable, "-c", program, *arguments, "--kubeconfig", str(kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=deadline(60))
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "")


# logs


@pytest.fixture
def running(cluster: WatchedCluster) -> WatchedCluster:
    cluster.show(seen_job(), *(ready(pod(host)) for host in range(4)))
    for host in range(4):
        cluster.logs[f"digits-1-0-{host}"] = (
            f"2026-01-15T12:00:00.1Z one of {host}\n2026-01-15T12:00:01.1Z two of {host}".encode()
        )
    return cluster


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "one of 0\ntwo of 0\n"),
        (["--host", "3"], "one of 3\ntwo of 3\n"),
        (["--slice-index", "0", "--host", "1"], "one of 1\ntwo of 1\n"),
        (["--attempt", "1"], "one of 0\ntwo of 0\n"),
        (["--tail", "1"], "two of 0\n"),
        (["--timestamps"], "2026-01-15T12:00:00.1Z one of 0\n2026-01-15T12:00:01.1Z two of 0\n"),
        (["--host", "2", "--host", "1"], "[0/2] one of 2\n[0/2] two of 2\n[0/1] one of 1\n[0/1] two of 1\n"),
        (["--all", "--tail", "1"], "".join(f"[0/{host}] two of {host}\n" for host in range(4))),
        (["--slice-index", "0", "--tail", "1"], "".join(f"[0/{host}] two of {host}\n" for host in range(4))),
    ],
)
def test_whose_log_is_printed(running: WatchedCluster, kubeconfig: Path, arguments: list[str], printed: str) -> None:
    result = tpujob(kubeconfig, "logs", "digits", *arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "4"],
        ["--host", "-1"],
        ["--slice-index", "1"],
        ["--attempt", "2"],
        ["--all", "--host", "1"],
        ["--failed", "-f"],
    ],
    ids=" ".join,
)
def test_hosts_slices_and_attempts_must_exist(
    running: WatchedCluster, kubeconfig: Path, arguments: list[str], snapshot: SnapshotAssertion
) -> None:
    assert told(tpujob(kubeconfig, "logs", "digits", *arguments), code=2)[-1] == snapshot


def test_more_logs_than_connections_cannot_be_followed(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    cluster.show(seen_job(spec={"slice": {"acceleratorType": "tpu7x-18432"}, "recipe.globalBatchSize": 18432}))
    message = told(tpujob(kubeconfig, "logs", "digits", "--all", "-f"), code=2)[-1]
    assert re.findall(r"\d+", message) == ["2304", "100"]
    assert message == snapshot


def test_the_log_of_the_worker_that_failed(cluster: WatchedCluster, kubeconfig: Path) -> None:
    show(cluster, "failed")
    cluster.logs["digits-1-0-2"] = b"2026-01-15T12:00:00.1Z its last words\n"
    assert tpujob(kubeconfig, "logs", "digits", "--failed").stdout == "its last words\n"


def test_without_the_failed_pod_the_status_tells_of_its_failure(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    show(cluster, "restarting")
    result = tpujob(kubeconfig, "logs", "digits", "--failed")
    assert result.exit_code == 0
    assert result.stderr == snapshot
    assert result.stdout.splitlines() == snapshot


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        ("running", ["--failed"]),
        ("running", []),
        ("failed", []),
        ("not seen", []),
    ],
    ids=str,
)
def test_a_missing_log_is_explained(
    cluster: WatchedCluster, kubeconfig: Path, stage: str, arguments: list[str], snapshot: SnapshotAssertion
) -> None:
    show(cluster, stage)
    assert told(tpujob(kubeconfig, "logs", "digits", *arguments)) == snapshot


# What getrusage says of a process includes the one that it was forked from.
REPORTS_ITS_PEAK = [
    sys.executable,
    "-c",
    "import atexit, re, sys, pathlib; from tpu_training_operator.cli.main import main;"
    "status = pathlib.Path('/proc/self/status');"
    "atexit.register(lambda: print(re.search('VmHWM: *([0-9]+)', status.read_text().replace('\\t', ' '))[1],"
    " file=sys.stderr)); main()",
]
LONG = 100 * 2**20
LINE = b"2026-01-15T12:00:00.123456789Z " + b"x" * 968 + b"\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("arguments", "piece", "pieces"),
    [(["--all"], b"x" * 2**16, LONG // 2**16), (["--host", "0"], LINE * 64, LONG // (64 * len(LINE)))],
    ids=["one line without an end, among others", "lines of 1000 bytes"],
)
def test_a_log_of_any_length_takes_the_same_memory(
    running: WatchedCluster, kubeconfig: Path, tmp_path: Path, arguments: list[str], piece: bytes, pieces: int
) -> None:
    """100 MiB go through the command; what it takes above a log of two lines is less than a tenth of that."""
    command = [*REPORTS_ITS_PEAK, "logs", "digits", *arguments, "--kubeconfig", str(kubeconfig)]

    def peak() -> tuple[int, int]:
        """Its resident memory at its most, and how much it printed; in bytes."""
        out = tmp_path / "out"
        with out.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=True)
        printed = out.stat().st_size
        out.unlink()
        return int(done.stderr) * 1024, printed

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"2026-01-15T12:00:00.123456789Z begin ")
        for _ in range(pieces):
            await response.write(piece)
        return response

    short, _ = peak()
    running.faults["log digits-1-0-0"] = [endless]
    long, printed = peak()
    assert printed > 0.95 * LONG
    assert long - short < LONG // 10


def test_a_closed_pipe_ends_the_command_quietly(running: WatchedCluster, kubeconfig: Path) -> None:
    running.logs["digits-1-0-0"] = LINE * 10_000
    command = [sys.executable, "-c", PROGRAM, "logs", "digits", "--kubeconfig", str(kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


# A stranger's text


def on_a_terminal(kubeconfig: Path, *arguments: str) -> str:
    """What a terminal is given to show."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, *arguments, "--kubeconfig", str(kubeconfig)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        # Linux says EIO where the last program has closed its side.
        with suppress(OSError):
            while piece := os.read(ours, 65536):
                shown += piece
    os.close(ours)
    return shown.decode()


@pytest.fixture
def hostile(cluster: WatchedCluster) -> WatchedCluster:
    """Its status was written by somebody who means ill, and so were the pods' messages and the log."""
    job = copy.deepcopy(JOBS["failed"].job)
    job["status"]["lastFailure"] |= {"message": HOSTILE, "node": HOSTILE, "reason": HOSTILE, "pod": HOSTILE}
    job["status"]["progress"] = {"step": 1, "totalSteps": 2, "loss": HOSTILE, "warnings": [HOSTILE]}
    for condition in job["status"]["conditions"]:
        condition["message"] = HOSTILE
    cluster.show(job, *JOBS["failed"].pods)
    cluster.logs["digits-1-0-0"] = f"2026-01-15T12:00:00.1Z {HOSTILE}\n".encode()
    cluster.logs["digits-1-0-1"] = cluster.logs["digits-1-0-0"]
    return cluster


@pytest.mark.parametrize(
    "command",
    [
        ["status", "digits"],
        ["watch", "digits"],
        ["logs", "digits"],
        ["logs", "digits", "--host", "0", "--host", "1"],
    ],
    ids=" ".join,
)
def test_a_terminal_gets_no_control_characters_from_strangers(
    hostile: WatchedCluster, kubeconfig: Path, command: list[str]
) -> None:
    shown = on_a_terminal(kubeconfig, *command)
    assert "digits" in shown or "gnp.exe" in shown
    assert obeyed(shown) == []
    assert not re.search("another title|cHduZWQ", shown)


def test_a_pipe_gets_a_log_as_it_was_written(hostile: WatchedCluster, kubeconfig: Path) -> None:
    assert tpujob(kubeconfig, "logs", "digits").stdout_bytes == f"{HOSTILE}\n".encode()


@pytest.mark.parametrize("answer", [status, plain_text], ids=["JSON", "text"])
def test_an_error_is_shown_without_control_characters(
    cluster: WatchedCluster, kubeconfig: Path, answer: Callable[..., web.Response]
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return answer(500, "InternalError", HOSTILE)

    cluster.faults["get TPUTrainingJob"] = [refuse]
    assert obeyed("\n".join(told(tpujob(kubeconfig, "status", "digits")))) == []


# No answer


@pytest.mark.parametrize("command", [["status", "digit"], ["watch", "digit"], ["logs", "digit"]], ids=" ".join)
def test_an_unknown_job_is_answered_with_the_nearest_name(
    cluster: WatchedCluster, kubeconfig: Path, command: list[str], snapshot: SnapshotAssertion
) -> None:
    assert told(tpujob(kubeconfig, *command)) == snapshot
    show(cluster, "running")
    assert told(tpujob(kubeconfig, *command)) == snapshot


def test_without_a_near_name_the_existing_jobs_are_named(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    job = seen_job()
    for number in range(7):
        cluster.show({**job, "metadata": {**job["metadata"], "name": f"train-{number}"}})
    assert told(tpujob(kubeconfig, "status", "nope")) == snapshot


RIGHTS = "tpujob: needed: get, list and watch tputrainingjobs.tpu-operator.dev and pods; get pods/log"


@pytest.mark.parametrize(
    ("what", "command"),
    [
        ("get TPUTrainingJob", ["status", "digits"]),
        ("list tputrainingjobs", ["status"]),
        ("list pods", ["status", "digits"]),
        ("list pods", ["watch", "digits"]),
        ("log digits-1-0-0", ["logs", "digits"]),
        ("log digits-1-0-0", ["logs", "digits", "-f"]),
    ],
)
def test_missing_rights_are_named(running: WatchedCluster, kubeconfig: Path, what: str, command: list[str]) -> None:
    refusal = 'is forbidden: User "me" cannot do that in the namespace "default"'
    running.faults[what] = [refuses(403, "Forbidden", refusal)]
    assert told(tpujob(kubeconfig, *command)) == [f"tpujob: {refusal}", RIGHTS]


@pytest.mark.parametrize(
    "command", [["status"], ["status", "digits"], ["watch", "digits"], ["logs", "digits"]], ids=" ".join
)
def test_a_cluster_without_the_crd_is_told_how_to_install_it(
    cluster: WatchedCluster, kubeconfig: Path, command: list[str], snapshot: SnapshotAssertion
) -> None:
    async def no_page(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text="404 page not found\n")

    cluster.faults["get TPUTrainingJob"] = cluster.faults["list tputrainingjobs"] = [no_page]
    [line] = told(tpujob(kubeconfig, *command))
    assert line == snapshot


@pytest.mark.parametrize("command", [["status"], ["status", "digits"], ["watch", "digits"], ["logs", "digits", "-f"]])
def test_an_unreachable_cluster_is_named(tmp_path: Path, command: list[str]) -> None:
    url = f"https://127.0.0.1:{free_port()}"
    [line] = told(tpujob(kubeconfig_for(url, tmp_path / "config"), *command))
    assert line.startswith(f"tpujob: {url} cannot be reached: GET /")
    assert line.endswith(": connection refused")


def test_rejected_credentials_are_reported(
    cluster: WatchedCluster, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    cluster.faults["list tputrainingjobs"] = [refuses(401, "Unauthorized", "Unauthorized")]
    [line] = told(tpujob(kubeconfig, "status"))
    assert cluster.url.rstrip("/") in line
    assert line == snapshot


def test_without_a_kubeconfig_it_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    [line] = told(CliRunner().invoke(main, ["status"]))
    assert line == snapshot


def test_the_kubectl_plugin_calls_itself_kubectl_tpujob(
    monkeypatch: pytest.MonkeyPatch, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/kubectl-tpujob"])
    assert told(tpujob(kubeconfig, "watch"), code=2)[0] == snapshot
    assert told(tpujob(kubeconfig, "status", "digits"))[0] == snapshot
