"""`tpujob check-slice`: the table of a slice, its exit status, what it says without one, and that no job is left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from tests.fakes.api_server import refuses
from tests.fakes.watched_cluster import WatchedCluster, kubeconfig_for, served_in_thread
from tests.unit.hostile_texts import HOSTILE, obeyed
from tests.unit.pods import ended, pod
from tests.unit.seen_jobs import condition
from tpu_contract.slice_check import SLICE_CHECK_MARKER, LineVerdict, SliceCheckLine, SliceSection, SliceTable, to_json
from tpu_training_operator.api import constants
from tpu_training_operator.api.constants import NODE_LABEL_NODE_POOL, SLICE_CHECK_COMMAND
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.cli.main import main
from tpu_training_operator.kube.cluster import JOBS, Object

TYPE = "v5litepod-8"
USER = SliceCheckLine(SliceSection.POD, "user", LineVerdict.OK, "uid 65532")
CHIPS = SliceCheckLine(SliceSection.CHIPS, "HBM", LineVerdict.NOT_TRIED, advice="the hardware is CPU")
PORT = SliceCheckLine(
    SliceSection.NETWORK,
    "port 12355",
    LineVerdict.FAILED,
    "refused",
    "open",
    host="check-1-0-1",
    node="node-1",
    advice="let the pods of a job reach each other",
)
FIT = SliceTable((USER, CHIPS), {"meet": 1.25})
UNFIT = SliceTable((*FIT.lines, PORT), FIT.seconds)


def failure(kind: str, reason: str, message: str, code: int = 1) -> Object:
    place = {"attempt": 1, "pod": "check-1-0-1", "node": "node-1", "slice": 0, "host": 1}
    return place | {
        "class": kind,
        "reason": reason,
        "message": message,
        "exitCode": code,
        "time": "2026-01-15T12:00:00Z",
    }


def line_of(table: SliceTable) -> str:
    return SLICE_CHECK_MARKER + to_json(table)


@dataclass(frozen=True)
class Told:
    """What a job does once it is created: its log, and its end."""

    log: list[str] = field(default_factory=list)
    state: str = "Succeeded"
    failure: Object | None = None
    message: str = "attempt 1: all workers have ended"

    def __call__(self, cluster: WatchedCluster, job: Object) -> None:
        name = f"{job['metadata']['name']}-1-0-0"
        lines = (f"2026-01-15T12:00:00.{index:09}Z {line}\n" for index, line in enumerate(self.log))
        cluster.logs[name] = "".join(lines).encode()
        body = ended(pod())
        cluster.show({**body, "metadata": {**body["metadata"], "name": name, "ownerReferences": []}})
        conditions = [condition("Ready", "False", "Because", self.message)]
        if self.state in ("Succeeded", "Failed"):
            conditions.append(condition(self.state, "True", "Because", self.message))
        status = {"state": self.state, "attempt": 1, "conditions": conditions}
        cluster.show({**job, "status": status | ({"lastFailure": self.failure} if self.failure else {})})


@pytest.fixture
def cluster() -> Iterator[WatchedCluster]:
    with served_in_thread(WatchedCluster()) as started:
        yield started


@pytest.fixture
def check(cluster: WatchedCluster, tmp_path: Path) -> Callable[..., Result]:
    config = kubeconfig_for(cluster.url, tmp_path / "config")

    def run(told: Told | None = None, *arguments: str) -> Result:
        if told is not None:
            cluster.react = lambda job: told(cluster, job)
        usual = ["check-slice", TYPE, "--image", "registry/trainer:1", "--kubeconfig", str(config)]
        return CliRunner().invoke(main, [*usual, *arguments])

    return run


def jobs_of(cluster: WatchedCluster) -> list[str]:
    return [name for plural, _, name in cluster.store._objects if plural == JOBS.plural]


HOST_DIED = failure("Infrastructure", "DeviceFailed", "open /dev/vfio/0: Input/output error")
TOO_OLD = failure("UserError", "BadSpec", "run spec /etc/tpu-training/run.json: entrypoint: missing", 78)
NO_TRAINER = failure("UserError", "UserError", "No module named tpu_trainer")
ENDINGS: dict[str, tuple[Told, int, str]] = {
    "fit": (Told([line_of(FIT)]), 0, ""),
    "unfit": (Told([line_of(UNFIT)], "Failed", failure("Infrastructure", "SliceUnfit", "port 12355", 72)), 1, ""),
    "a failed line of a job that has succeeded": (Told([line_of(UNFIT)]), 1, ""),
    "all lines are fine, and yet the job failed": (Told([line_of(FIT)], "Failed", HOST_DIED), 1, "DeviceFailed"),
    "a host died before the table": (Told([], "Failed", HOST_DIED), 1, "check-1-0-1 on node-1"),
    "worker 0 was preempted": (
        Told([], "Failed", failure("Preemption", "NodeShutdown", "the node shuts down", 143)),
        2,
        "NodeShutdown",
    ),
    "an older trainer": (Told([], "Failed", TOO_OLD), 2, "does not know this check"),
    "no trainer in the image": (Told([], "Failed", NO_TRAINER), 2, "does not know this check"),
    "the deadline": (Told([], "Failed", message="the job was active for 1800 s"), 2, "active for 1800 s"),
    "refused": (Told([], "Invalid", message="spec.trainer: a webhook says no"), 2, "a webhook says no"),
    "no table": (Told(["ready", SLICE_CHECK_MARKER.strip()]), 2, "has no table"),
    "a table that is cut off": (Told([line_of(FIT)[:-20]]), 2, "has no table"),
    "a line that is too long": (Told([SLICE_CHECK_MARKER + "[" * 3_000_000]), 2, "has no table"),
    "lines that imitate a table": (
        Told([f"it says {line_of(FIT)}", line_of(UNFIT), SLICE_CHECK_MARKER + "{}", SLICE_CHECK_MARKER + "null"]),
        1,
        "",
    ),
}


@pytest.mark.parametrize(("told", "code", "says"), ENDINGS.values(), ids=ENDINGS)
def test_every_end_has_its_status_and_its_words_and_leaves_no_job(
    cluster: WatchedCluster, check: Callable[..., Result], told: Told, code: int, says: str
) -> None:
    result = check(told)
    assert (result.exit_code, says in result.stderr) == (code, True), result.output
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert jobs_of(cluster) == []


def test_the_table_names_hosts_and_says_what_to_do(check: Callable[..., Result], snapshot: SnapshotAssertion) -> None:
    assert [line.rstrip() for line in check(Told([line_of(UNFIT)])).stdout.splitlines()] == snapshot


def test_a_program_reads_the_table_as_json_and_a_person_as_a_page(check: Callable[..., Result]) -> None:
    document = json.loads(check(Told([line_of(UNFIT)]), "-o", "json").stdout)
    assert (document["fit"], document["acceleratorType"]) == (False, TYPE)
    assert document["lines"][2]["host"] == "check-1-0-1"
    page = check(Told([line_of(UNFIT)]), "-o", "html").stdout
    assert page.startswith("<!DOCTYPE html>")
    assert "port 12355" in page


def test_a_terminal_obeys_nothing_that_a_worker_has_written(check: Callable[..., Result]) -> None:
    lines = tuple(
        SliceCheckLine(SliceSection.POD, text, LineVerdict.FAILED, text, text, host=text, node=text, advice=text)
        for text in HOSTILE
    )
    table = SliceTable(lines, dict.fromkeys(HOSTILE, 1.0))
    for output in ("table", "json", "html"):
        assert not obeyed(check(Told([line_of(table)]), "-o", output).stdout)


def test_the_job_is_one_attempt_that_ends_and_goes_by_itself(
    cluster: WatchedCluster, check: Callable[..., Result]
) -> None:
    made: list[Object] = []
    cluster.react = made.append
    # What YAML would read as a number or a mapping is a name here.
    values = ("slice.count=2", "checkpoint.uri=gs://bucket/probe", "trainer.serviceAccountName=trainer")
    options = ("--on", "1e3", "--queue", "team", "--timeout", "1", *(f"--set={value}" for value in values))
    result = check(None, *options)
    assert (result.exit_code, "no verdict within 1 s" in result.stderr) == (2, True), result.output
    [body] = made
    job = parse_job(body)
    trainer, policy = job.spec.trainer, job.spec.run_policy
    assert trainer.command == SLICE_CHECK_COMMAND
    assert (trainer.node_selector, trainer.service_account_name) == ({NODE_LABEL_NODE_POOL: "1e3"}, "trainer")
    assert body["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert (policy.active_deadline_seconds, policy.ttl_seconds_after_finished) == (1, 3600)
    assert {limit.max for limit in policy.restart.limits} == {0}
    assert job.spec.slice.count == 2
    assert jobs_of(cluster) == []


def test_what_a_slice_waits_for_is_said_when_the_time_is_over(check: Callable[..., Result]) -> None:
    result = check(Told([], "Starting", message="attempt 1: 0 of 2 hosts ready; 2 hosts: no nodes"), "--timeout", "1")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith("0 of 2 hosts ready; 2 hosts: no nodes")


def test_two_checks_of_one_slice_are_two_jobs(cluster: WatchedCluster, check: Callable[..., Result]) -> None:
    for _ in range(2):
        check(Told([line_of(FIT)]), "--keep")
    assert len(set(jobs_of(cluster))) == 2


REFUSALS = {
    "no right to create": ("create job", "create, delete, get"),
    "no right to read logs": ("log *", "get pods/log"),
    "no right to list pods": ("list pods", "list and watch pods"),
}


@pytest.mark.parametrize(("request_", "needs"), REFUSALS.values(), ids=REFUSALS)
def test_a_missing_right_is_named_and_no_job_is_left(
    cluster: WatchedCluster, check: Callable[..., Result], request_: str, needs: str
) -> None:
    refusal = refuses(403, "Forbidden", "you may not")
    told = Told([line_of(FIT)])

    def react(job: Object) -> None:
        told(cluster, job)
        cluster.faults[request_.replace("*", f"{job['metadata']['name']}-1-0-0")] = [refusal] * 9

    cluster.react = react
    if request_ != "log *":
        cluster.faults[request_] = [refusal] * 9
    result = check()
    assert (result.exit_code, needs in result.stderr) == (2, True), result.output
    assert jobs_of(cluster) == []


def test_a_job_that_cannot_be_deleted_is_not_left_in_silence(
    cluster: WatchedCluster, check: Callable[..., Result]
) -> None:
    cluster.faults["delete job"] = [refuses(403, "Forbidden", "you may not")]
    result = check(Told([line_of(FIT)]))
    [name] = jobs_of(cluster)
    assert result.exit_code == 0
    assert f"tpujob delete {name} -n default --kubeconfig " in result.stderr


def test_a_job_that_is_deleted_meanwhile_has_no_verdict(cluster: WatchedCluster, check: Callable[..., Result]) -> None:
    cluster.react = lambda job: cluster.remove(JOBS, job["metadata"]["name"])
    result = check()
    assert (result.exit_code, "was deleted before its end" in result.stderr) == (2, True), result.output


WRONG = {
    "a slice that does not exist": (["check-slice", "v5litepod-17", "--image", "i"], "nearest: v5litepod-16"),
    "no image": (["check-slice", TYPE], "--image"),
    "a pool without a cluster": (["check-slice", TYPE, "--here", "--on", "pool"], "--on is for a cluster"),
    "more hosts than this machine has memory for": (["check-slice", "v4-8192", "--here"], "processes of some"),
    "another slice": (["check-slice", TYPE, "--here", "--set", "slice.acceleratorType=v4-8"], "the slice TYPE"),
    "all of another slice": (["check-slice", TYPE, "--here", "--set", "spec.slice={count: 2}"], "the slice TYPE"),
    "another program": (["check-slice", TYPE, "--here", "--set", "trainer.command=[true]"], "a program of its own"),
    "another place": (["check-slice", TYPE, "--here", "--set", "placement.count=1"], "the slice TYPE"),
    "a field that does not exist": (["check-slice", TYPE, "--here", "--set", "trainer.colour=red"], "colour"),
}


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_before_anything_is_created(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_an_interrupt_deletes_the_job(cluster: WatchedCluster, tmp_path: Path) -> None:
    config = kubeconfig_for(cluster.url, tmp_path / "config")
    program = "from tpu_training_operator.cli.main import main; main()"
    command = [sys.executable, "-c", program, "check-slice", TYPE, "--image", "i", "--kubeconfig", str(config)]
    environ: dict[str, Any] = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        assert "created" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert (process.returncode, "deleted" in said) == (130, True), said
    assert jobs_of(cluster) == []


def test_the_operators_image_has_the_command_as_a_module() -> None:
    command = [sys.executable, "-m", "tpu_training_operator.cli", "check-slice", "--help"]
    assert "Usage: tpujob check-slice" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_this_machine_is_checked_with_a_process_for_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    table = line_of(UNFIT)
    worker.write_text(f"import os\nif os.environ['TPUJOB_HOST_INDEX'] == '0': print({table!r})\n")
    monkeypatch.setattr(constants, "SLICE_CHECK_COMMAND", ["python", str(worker)])
    result = CliRunner().invoke(main, ["check-slice", TYPE, "--here"])
    assert (result.exit_code, "port 12355" in result.stdout) == (1, True), result.output
