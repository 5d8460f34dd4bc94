"""`tpujob list`, `suspend` and `completion`, as far as it takes no API server; see tests/controlplane."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.fakes.watched_cluster import WatchedCluster, kubeconfig_for, served_in_thread
from tests.unit.jobs import job_body
from tests.unit.seen_jobs import JOBS
from tpu_training_operator.cli.common.changes import begin_from_scratch
from tpu_training_operator.cli.common.errors import WrongOption
from tpu_training_operator.cli.main import main
from tpu_training_operator.kube.cluster import Object


@pytest.fixture
def cluster() -> Iterator[WatchedCluster]:
    with served_in_thread(WatchedCluster()) as started:
        yield started


def tpujob(cluster: WatchedCluster, directory: Path, *arguments: str) -> Result:
    config = kubeconfig_for(cluster.url, directory / "config")
    return CliRunner().invoke(main, [*arguments, "--kubeconfig", str(config)])


def being_deleted(job: Object) -> Object:
    return {**job, "metadata": {**job["metadata"], "deletionTimestamp": "2026-01-15T12:00:00Z"}}


def test_the_list_has_what_programs_and_people_ask_for(cluster: WatchedCluster, tmp_path: Path) -> None:
    running = JOBS["running"].job
    cluster.show(running, being_deleted({**running, "metadata": {**running["metadata"], "name": "letters"}}))
    rows = [line.split() for line in tpujob(cluster, tmp_path, "ls").stdout.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["digits", "Running"], ["letters", "Deleting"]]
    names = tpujob(cluster, tmp_path, "list", "-o", "name").stdout.split()
    assert names == [f"tputrainingjob.tpu-operator.dev/{name}" for name in ("digits", "letters")]
    first, second = yaml.safe_load(tpujob(cluster, tmp_path, "list", "-A", "-o", "yaml").stdout)
    assert first["remainingSeconds"] == running["status"]["progress"]["estimatedRemainingSeconds"]
    assert (first["isBeingDeleted"], second["isBeingDeleted"]) == (False, True)
    shown = tpujob(cluster, tmp_path, "status", "letters").stdout
    assert shown.startswith("letters: Running, being deleted, attempt 1")


def test_steps_that_would_be_lost_are_asked_about(cluster: WatchedCluster, tmp_path: Path) -> None:
    job = JOBS["running"].job
    spec = {name: value for name, value in job["spec"].items() if name != "checkpoint"}
    cluster.show({**job, "spec": spec})
    refused = tpujob(cluster, tmp_path, "suspend", "digits")
    assert (refused.exit_code, refused.stdout) == (2, ""), refused.output
    assert "It has no checkpoint.uri, so its 150 steps are lost." in refused.stderr
    assert cluster.queries("patch job") == []


def test_what_has_ended_is_left_alone(cluster: WatchedCluster, tmp_path: Path) -> None:
    cluster.show(JOBS["failed"].job)
    refused = tpujob(cluster, tmp_path, "resume", "digits")
    assert (refused.exit_code, "submit --replace" in refused.stderr) == (1, True), refused.output


def test_a_job_that_its_budget_has_stopped_is_not_resumed_by_this_command(
    cluster: WatchedCluster, tmp_path: Path
) -> None:
    job = JOBS["suspended"].job
    cluster.show({**job, "spec": {name: value for name, value in job["spec"].items() if name != "runPolicy"}})
    told = tpujob(cluster, tmp_path, "resume", "digits").stdout
    assert told.startswith("job digits is not suspended by its spec; it is Suspended: suspended by "), told


def test_one_wrong_name_keeps_the_other_jobs_as_they_are(cluster: WatchedCluster, tmp_path: Path) -> None:
    cluster.show(JOBS["running"].job)
    refused = tpujob(cluster, tmp_path, "suspend", "--yes", "digits", "letters")
    assert (refused.exit_code, cluster.queries("patch job")) == (1, []), refused.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_names_the_program_and_its_commands(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell])
    assert (script.exit_code, f"_TPUJOB_COMPLETE={shell}_complete" in script.stdout) == (0, True), script.output


def test_a_shell_gets_commands_and_options() -> None:
    program = "from tpu_training_operator.cli.main import main; main(prog_name='tpujob')"
    for words, expected in (("tpujob su", {"submit", "suspend"}), ("tpujob submit --re", {"--replace"})):
        environ = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TPUJOB_COMPLETE": "bash_complete"}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
        )
        assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected


def test_from_scratch_means_a_folder_of_its_own() -> None:
    body = job_body({"spec.checkpoint": {"uri": "gs://bucket/kept/", "everySteps": 10}})
    begin_from_scratch(body)
    checkpoint = body["spec"]["checkpoint"]
    assert checkpoint["uri"].startswith("gs://bucket/kept/from-scratch-20")
    assert checkpoint["everySteps"] == 10
    for others in ({}, {"spec.checkpoint": {"everySteps": 10}}):
        body = job_body(others)
        begin_from_scratch(body)
        assert body == job_body(others)
    with pytest.raises(WrongOption, match="resumeFrom"):
        begin_from_scratch(job_body({"spec.checkpoint": {"uri": "/kept", "resumeFrom": "/kept/team/first"}}))
