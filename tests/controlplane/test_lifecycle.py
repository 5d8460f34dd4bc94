"""`tpujob list`, `suspend`, `resume`, `delete`, `submit --replace` on an API server: what they do, ask and wait for."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.kwok import cpu_nodes_for
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.jobs import Namespace, digits
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.test_cli_cluster import Reading
from tests.controlplane.tpujob import PROGRAM, start, tpujob
from tests.stories import Group, Stories, selected, told_together
from tests.trainer.fork_server import ForkedProcess

HOLD = "example.com/hold"


@dataclass(frozen=True)
class User:
    """An administrator of a namespace, at a terminal or in a script."""

    space: Namespace

    def _where(self) -> tuple[str, ...]:
        return ("-n", self.space.name, "--kubeconfig", str(self.space.cluster.kubeconfig))

    def tpujob(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return tpujob(*arguments, *self._where())

    def succeeds(self, *arguments: str) -> str:
        done = self.tpujob(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *arguments: str, code: int = 1) -> str:
        done = self.tpujob(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        return done.stderr

    def answers(self, answer: bytes, *arguments: str) -> tuple[int, str]:
        """At a terminal, types `answer` at the question; returns the exit status and what is on the screen."""
        ours, theirs = pty.openpty()
        process = start(dict.fromkeys(range(3), os.ttyname(theirs)), *arguments, *self._where())
        process.stdout.close()
        # Until it has opened the terminal, it would be the last to close it.
        while not select.select([ours], [], [], 0.1)[0] and process.poll() is None:
            pass
        os.close(theirs)
        shown = b""
        try:
            while b"[y/N]" not in shown:
                shown += os.read(ours, 65536)
            if answer == b"^C":
                # Again and again: one that comes just before the read of the answer does not interrupt it.
                while b"Aborted" not in shown:
                    process.send_signal(signal.SIGINT)
                    while select.select([ours], [], [], 1.0)[0] and b"Aborted" not in shown:
                        shown += os.read(ours, 65536)
            else:
                os.write(ours, answer)
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:
            # Linux says EIO where the last program has closed its side.
            pass
        os.close(ours)
        return process.wait(), shown.decode()

    @contextmanager
    def started(self, *arguments: str) -> Iterator[tuple[ForkedProcess, IO[str]]]:
        """Yields the process and what it says on stderr."""
        process = start({1: os.devnull}, *arguments, *self._where())
        with process.stdout as said:
            try:
                yield process, said
            finally:
                process.kill()
                process.wait()

    def uids(self) -> str:
        return self.space.kubectl("get", "tpujob", "-o", "jsonpath={.items[*].metadata.uid}")

    def names(self) -> str:
        return self.space.kubectl("get", "tpujob", "-o", "name")


def a_suspended_job_keeps_its_spec_and_is_resumed(user: User) -> None:
    user.space.apply(digits())
    before = user.space.job()
    told = user.succeeds("suspend", "digits")
    assert f" tpujob resume digits -n {user.space.name} --kubeconfig " in told
    assert user.space.job()["spec"]["runPolicy"]["suspend"] is True
    assert "already suspended" in user.succeeds("suspend", "digits")
    assert "digits resumed" in user.succeeds("resume", "digits")
    assert "not suspended" in user.succeeds("resume", "digits")
    after = user.space.job()
    assert after["spec"].pop("runPolicy")["suspend"] is False
    assert after["spec"] == before["spec"]
    assert "tpujob" in {entry["manager"] for entry in after["metadata"]["managedFields"]}


def a_job_is_deleted_only_with_a_yes(user: User) -> None:
    user.space.apply(digits())
    assert "add --yes" in user.refusal("delete", "digits", code=2)
    for answer in (b"n\n", b"\n", b"^C"):
        code, shown = user.answers(answer, "delete", "digits")
        assert (code, f"Delete job digits in namespace {user.space.name} of https://" in shown) == (1, True), shown
        assert user.names() != ""
    code, shown = user.answers(b"y\n", "delete", "digits")
    assert (code, "job digits deleted" in shown, user.names()) == (0, True, ""), shown
    assert "there is no job 'digits'" in user.refusal("delete", "digits", "--yes")


def a_deletion_says_which_finalizer_it_waits_for(user: User) -> None:
    space = user.space
    job = digits()
    job["metadata"]["finalizers"] = [HOLD]
    space.apply(job)
    with user.started("delete", "digits", "--yes") as (process, said):
        assert any(f"waits for finalizer {HOLD}" in line for line in iter(said.readline, ""))
        process.send_signal(signal.SIGINT)
        assert "the deletion of job digits goes on" in said.read()
        assert process.wait(deadline(60)) == 130
    late = user.refusal("delete", "digits", "--timeout", "1")
    assert f"after 1 s (--timeout) job digits still waits for finalizer {HOLD}; its deletion goes on" in late
    for command in ("suspend", "resume"):
        assert "job digits is being deleted" in user.refusal(command, "digits")
    assert user.succeeds("ls").splitlines()[1].split()[:2] == ["digits", "Deleting"]
    (entry,) = json.loads(user.succeeds("list", "-o", "json"))
    assert entry["isBeingDeleted"] is True
    path = space.cluster.directory / f"{space.name}.yaml"
    path.write_text(yaml.safe_dump(digits()))
    assert "is being deleted: add --replace" in user.refusal("submit", str(path))
    with (
        user.started("delete", "digits") as (deletes, said),
        user.started("submit", str(path), "--replace") as (
            replaces,
            told,
        ),
    ):
        for lines in (said, told):
            assert any(f"waits for finalizer {HOLD}" in line for line in iter(lines.readline, ""))
        space.kubectl("patch", "tpujob", "digits", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
        assert (deletes.wait(deadline(60)), replaces.wait(deadline(60))) == (0, 0)
    assert "deletionTimestamp" not in space.job()["metadata"]
    path.unlink()


def a_missing_right_is_named_before_anything_happens(user: User) -> None:
    reading = Reading.of(user.space.cluster, user.space.name)
    user.space.apply(digits())
    for command, needed in (("delete", "get, list, watch and delete"), ("suspend", "get and patch")):
        done = reading.tpujob(command, "digits", *(["--yes"] if command == "delete" else []))
        assert (done.returncode, f"needed: {needed} tputrainingjobs" in done.stderr) == (1, True), done.stderr
    assert "digits" in reading.tpujob("list").stdout
    assert user.names() != ""


def a_job_of_another_context_is_found_there_alone(user: User) -> None:
    space = user.space
    config = yaml.safe_load(Path(space.cluster.kubeconfig).read_text())
    [context] = config["contexts"]
    here = {"name": "here", "context": context["context"] | {"namespace": space.name}}
    other = {"name": "other", "context": here["context"] | {"namespace": "default"}}
    path = space.cluster.directory / f"{space.name}.config"
    path.write_text(yaml.safe_dump(config | {"contexts": [here, other], "current-context": "other"}))
    space.apply(digits())

    def chosen_by_variable(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "KUBECONFIG": str(path)})

    assert "there is no job 'digits' in namespace 'default'" in chosen_by_variable("suspend", "digits").stderr
    told = chosen_by_variable("suspend", "digits", "--context", "here").stdout
    assert told.endswith(f" tpujob resume digits -n {space.name} --context here\n")
    path.unlink()


def a_running_job_is_deleted_with_its_workers(user: User) -> None:
    space = user.space
    space.apply(digits())
    space.wait_for_state("Running")
    space.kubectl("label", "tpujob", "digits", "team=vision")
    for selector, names in (("team in (vision)", "tputrainingjob.tpu-operator.dev/digits\n"), ("team!=vision", "")):
        assert user.succeeds("list", "-o", "name", "-l", selector) == names
    assert user.succeeds("ls").splitlines()[1].split()[:3] == ["digits", "Running", "v5litepod-16"]
    assert "job digits deleted" in user.succeeds("delete", "digits", "--yes")
    assert (user.names(), space.pods()) == ("", [])


def a_running_job_is_replaced_and_watched_to_its_end(user: User) -> None:
    space = user.space
    path = space.cluster.directory / f"{space.name}.yaml"
    path.write_text(yaml.safe_dump(digits()))
    submit = ("submit", str(path), "--watch")
    with user.started(*submit) as (process, _):
        space.wait(lambda: user.uids() != "", "the job is created")
        space.wait_for_state("Running")
        process.send_signal(signal.SIGINT)
        assert process.wait(deadline(60)) == 130
    old = space.job()["metadata"]["uid"]
    with user.started(*submit, "--set", "recipe.seed=7", "--replace", "--yes") as (process, _):
        space.wait(lambda: user.uids() not in ("", old), "the job is replaced")
        new = space.job()["metadata"]["uid"]
        space.wait_for_state("Running")
        assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in space.pods()} == {new}
        space.finish("digits-1-0-0", exit_code=1)
        assert process.wait(deadline(60)) == 1
    done = user.tpujob(*submit, "--set", "recipe.seed=7")
    assert (done.returncode, "already exists" in done.stdout) == (1, True), done.stderr
    path.unlink()


def a_job_that_has_ended_is_neither_suspended_nor_resumed(user: User) -> None:
    space = user.space
    space.apply(digits())
    space.wait_for_state("Running")
    for host in range(4):
        space.finish(f"digits-1-0-{host}")
    space.wait_for_state("Succeeded")
    for command in ("suspend", "resume"):
        assert "job digits has ended (Succeeded)" in user.refusal(command, "digits")


ALONE = {
    story.__name__: story
    for story in (
        a_suspended_job_keeps_its_spec_and_is_resumed,
        a_job_is_deleted_only_with_a_yes,
        a_deletion_says_which_finalizer_it_waits_for,
        a_missing_right_is_named_before_anything_happens,
        a_job_of_another_context_is_found_there_alone,
    )
}
OPERATED = {
    story.__name__: story
    for story in (
        a_running_job_is_deleted_with_its_workers,
        a_running_job_is_replaced_and_watched_to_its_end,
        a_job_that_has_ended_is_neither_suspended_nor_resumed,
    )
}


def tell(cluster: ControlPlane, story: Callable[[User], None]) -> None:
    with emptied_namespace(cluster.api) as name:
        story(User(Namespace(cluster, name)))


@pytest.fixture(scope="module")
def alone(control_plane: ControlPlane, job_definition: None, request: pytest.FixtureRequest) -> Iterator[Stories]:
    chosen = {name: partial(tell, control_plane, ALONE[name]) for name in selected(request, ALONE)}
    with told_together(Group(chosen, at_once=3)) as told:
        yield told


@pytest.fixture(scope="module")
def operated(
    control_plane: ControlPlane, served_everywhere: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Stories]:
    chosen = {name: partial(tell, control_plane, OPERATED[name]) for name in selected(request, OPERATED)}
    with cpu_nodes_for(control_plane, 12), told_together(Group(chosen, at_once=3)) as told:
        yield told


@pytest.mark.parametrize("story", ALONE)
def test_without_an_operator(story: str, alone: Stories) -> None:
    alone.end_of(story)


@pytest.mark.parametrize("story", OPERATED)
def test_with_an_operator(story: str, operated: Stories) -> None:
    operated.end_of(story)
