"""`tpujob submit` against a real API server: what it creates, whom it belongs to, and what is left when it cannot."""

import base64
import hashlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.jobs import Namespace, Object, digits
from tests.controlplane.tpujob import tpujob
from tests.stories import Group, Stories, selected, told_together
from tpu_training_operator.api.constants import LARGEST_SECRET
from tpu_training_operator.cli.code.packing import PackedCode
from tpu_training_operator.cli.code.place import secret

KEY = "code.tar.gz"


class Desk:
    """Where a user submits the digits job with `folder`, as an administrator of the namespace."""

    def __init__(self, space: Namespace, directory: Path) -> None:
        self.space, self.folder, self.kubeconfig = space, directory / "code", space.cluster.kubeconfig
        self.folder.mkdir()
        (self.folder / "train.py").write_text("def task(hp): ...\n")
        self._file = directory / "job.yaml"
        self.write(digits(trainer={"entrypoint": "train:task"}))

    def write(self, job: Object) -> None:
        self._file.write_text(yaml.safe_dump(job))

    def submit(self, *arguments: str, code: bool = True) -> subprocess.CompletedProcess[str]:
        what = ["-f", str(self._file), *(["--code", str(self.folder)] if code else []), *arguments]
        return tpujob("submit", *what, "-n", self.space.name, "--kubeconfig", str(self.kubeconfig))


def secrets_of(space: Namespace) -> list[Object]:
    found = space.cluster.api.call("GET", f"/api/v1/namespaces/{space.name}/secrets")["items"]
    return list(found)


def code_in_a_secret_belongs_to_its_job(desk: Desk) -> None:
    space = desk.space
    (desk.folder / ".env").write_text("PASSWORD=hunter2")
    done = desk.submit()
    assert done.returncode == 0, done.stderr
    assert "often hold secrets: .env;" in done.stderr
    (kept,) = secrets_of(space)
    job = space.job()
    archive = base64.b64decode(kept["data"][KEY])
    sha256 = hashlib.sha256(archive).hexdigest()
    uri = f"secret://digits-code-{sha256[:10]}"
    assert job["spec"]["trainer"]["code"] == {"uri": uri, "sha256": sha256}
    assert kept["metadata"]["name"] == uri.removeprefix("secret://")
    assert kept["immutable"] is True
    assert [owner["uid"] for owner in kept["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    code, created, follow = done.stdout.splitlines()
    assert all(fact in code for fact in ("1 file,", f"{len(archive)} bytes", sha256, uri))
    assert created.endswith(f" namespace {space.name}")
    assert follow.endswith(f" tpujob watch digits -n {space.name} --kubeconfig {desk.kubeconfig}")


def the_code_of_a_job_cannot_change(desk: Desk) -> None:
    space = desk.space
    assert desk.submit().returncode == 0
    job = space.job()
    job["spec"]["trainer"]["code"]["sha256"] = "0" * 64
    changed = space.cluster.kubectl("-n", space.name, "replace", "-f", "-", input=yaml.safe_dump(job), check=False)
    assert "trainer.code cannot change" in changed.stderr


def a_submission_that_was_cut_off_is_finished_by_the_same_command(desk: Desk) -> None:
    space = desk.space
    assert desk.submit().returncode == 0
    job, (kept,) = space.job(), secrets_of(space)
    space.kubectl("delete", "secret", kept["metadata"]["name"])
    for _ in range(2):
        done = desk.submit()
        assert (done.returncode, "job digits already exists" in done.stdout) == (0, True), done.stderr
    assert space.job()["metadata"]["uid"] == job["metadata"]["uid"]
    assert [one["data"] for one in secrets_of(space)] == [kept["data"]]


def other_code_or_another_spec_is_another_job(desk: Desk) -> None:
    space, folder = desk.space, desk.folder
    assert desk.submit().returncode == 0
    before = space.job()["spec"]
    (folder / "train.py").write_text("def task(hp): return None\n")
    for changes in ((), ("--set", "recipe.seed=7")):
        refused = desk.submit(*changes)
        assert refused.returncode == 1
        assert "already a job 'digits'" in refused.stderr
        assert "another spec or other code" in refused.stderr
        assert "add --replace to delete it first" in refused.stderr
    assert space.job()["spec"] == before
    assert len(secrets_of(space)) == 1


def what_an_earlier_job_of_the_name_has_left_is_replaced(desk: Desk) -> None:
    space = desk.space
    assert desk.submit().returncode == 0
    # The garbage collector has not come by yet.
    space.kubectl("delete", "tpujob", "digits", "--cascade=orphan")
    (left,) = secrets_of(space)
    owner = {"apiVersion": "tpu-operator.dev/v1alpha1", "kind": "TPUTrainingJob", "name": "digits", "uid": "gone"}
    left["metadata"]["ownerReferences"] = [owner]
    left |= {"apiVersion": "v1", "kind": "Secret"}
    space.kubectl("replace", "-f", "-", input=yaml.safe_dump(left))
    assert desk.submit().returncode == 0
    (kept,) = secrets_of(space)
    assert kept["metadata"]["ownerReferences"][0]["uid"] == space.job()["metadata"]["uid"]


def a_secret_of_somebody_else_is_left_alone_and_the_job_goes_again(desk: Desk) -> None:
    space = desk.space
    assert desk.submit().returncode == 0
    (kept,) = secrets_of(space)
    space.kubectl("delete", "tpujob", "digits", "--cascade=orphan")
    space.kubectl("delete", "secret", kept["metadata"]["name"])
    space.kubectl("create", "secret", "generic", kept["metadata"]["name"])
    refused = desk.submit()
    assert refused.returncode == 1
    assert "so the job was removed" in refused.stderr
    assert "already exists" in refused.stderr
    assert space.kubectl("get", "tpujob", "-o", "name") == ""


def a_secret_holds_a_mebibyte_counted_before_base64(desk: Desk) -> None:
    space, folder = desk.space, desk.folder
    assert desk.submit().returncode == 0
    for name, size, refusal in (("fits", LARGEST_SECRET, ""), ("large", LARGEST_SECRET + 1, "Too long")):
        body = yaml.safe_dump(secret(name, PackedCode(bytes(size), {}), space.job()))
        done = space.cluster.kubectl("-n", space.name, "create", "-f", "-", input=body, check=False)
        assert (refusal in done.stderr, bool(done.returncode)) == (True, bool(refusal)), done.stderr
    space.kubectl("delete", "tpujob", "digits")

    (folder / "noise").write_bytes(random.Random(1).randbytes(LARGEST_SECRET))
    refused = desk.submit()
    assert refused.returncode == 1
    assert "a Secret holds 1048576 (1 MiB" in refused.stderr
    assert "--code-to gs://bucket/path" in refused.stderr
    assert "noise 1.0 MiB, train.py 18 b" in refused.stderr
    assert space.kubectl("get", "tpujob", "-o", "name") == ""


def code_for_a_directory_is_there_before_the_job(desk: Desk) -> None:
    space, folder = desk.space, desk.folder
    done = desk.submit("--code-to", f"{folder.parent}/shared")
    assert done.returncode == 0, done.stderr
    code = space.job()["spec"]["trainer"]["code"]
    assert code["uri"] == f"{folder.parent}/shared/code-{code['sha256']}.tar.gz"
    assert hashlib.sha256(Path(code["uri"]).read_bytes()).hexdigest() == code["sha256"]
    assert secrets_of(space) == []


def a_job_without_code_is_created_as_it_stands(desk: Desk) -> None:
    space = desk.space
    done = desk.submit("--set", "recipe.seed=7", code=False)
    assert done.returncode == 0, done.stderr
    spec = space.job()["spec"]
    assert (spec["recipe"]["seed"], "code" in spec["trainer"]) == (7, False)


def what_is_wrong_is_said_before_anything_is_created(desk: Desk) -> None:
    space, folder = desk.space, desk.folder
    (folder / ".gitignore").write_text("train.py\n")
    warned = desk.submit()
    assert "no module train is packed" in warned.stderr
    space.kubectl("delete", "tpujob", "digits")

    desk.write(digits(slice={"acceleratorType": "v9-8"}))
    for arguments, code, words in (
        ((), 1, "there is no accelerator type 'v9-8'"),
        (("--set", "slice.acceleratorType=v5litepod-16", "--code-to", "s3://x"), 2, "--code-to s3://x: expected gs://"),
        (("--set", "slice.acceleratorType=v5litepod-16", "--code-to", "/dev/null"), 1, "cannot be written there"),
    ):
        refused = desk.submit(*arguments)
        assert (refused.returncode, words in refused.stderr) == (code, True), refused.stderr
    assert space.kubectl("get", "tpujob", "-o", "name") == ""


def a_dry_run_creates_nothing_and_says_what_the_cluster_refuses(desk: Desk) -> None:
    space = desk.space
    for output in ((), ("-o", "name"), ("-o", "json")):
        done = desk.submit("--dry-run", *output)
        assert (done.returncode, "dry run: nothing has changed" in done.stdout + done.stderr) == (0, True), done.stderr
    assert json.loads(done.stdout)["metadata"]["namespace"] == space.name
    space.kubectl("create", "quota", "none", "--hard=count/tputrainingjobs.tpu-operator.dev=0")

    def is_refused() -> bool:
        refused = desk.submit("--dry-run")
        return refused.returncode == 1 and "is forbidden" in refused.stderr and "quota: none" in refused.stderr

    # The API server knows the quota a moment after it has been created, and what is used of it when the kind is older.
    space.wait(is_refused, "the quota refuses the job")
    assert (space.kubectl("get", "tpujob", "-o", "name"), secrets_of(space)) == ("", [])


def a_program_reads_the_job_on_stdout_and_nothing_else(desk: Desk) -> None:
    done = desk.submit("-o", "name", "--name", "first")
    assert (done.stdout, done.returncode) == ("tputrainingjob.tpu-operator.dev/first\n", 0), done.stderr
    done = desk.submit("-o", "json", "--name", "second")
    created = json.loads(done.stdout)
    assert created["metadata"]["uid"] == desk.space.job("second")["metadata"]["uid"]
    assert "managedFields" not in created["metadata"]
    assert "created in namespace" in done.stderr


def a_job_is_replaced_only_with_a_yes_and_says_with_which_weights_it_begins(desk: Desk) -> None:
    space, folder = desk.space, desk.folder
    desk.write(digits(trainer={"entrypoint": "train:task"}, checkpoint={"uri": f"{folder.parent}/kept"}))
    first = desk.submit("--replace")
    assert "job digits created" in first.stdout, first.stderr
    before = space.job()
    (folder / "train.py").write_text("def task(hp): return None\n")
    assert f"continues from the newest checkpoint in {folder.parent}/kept/{space.name}/digits" in desk.submit().stderr

    asked = desk.submit("--replace")
    assert (asked.returncode, "add --yes" in asked.stderr) == (2, True), asked.stderr
    assert desk.submit("--replace", "--dry-run").returncode == 0
    assert space.job()["metadata"]["uid"] == before["metadata"]["uid"]

    done = desk.submit("--replace", "--yes")
    assert (done.returncode, "job digits replaced" in done.stdout) == (0, True), done.stderr
    assert "with weights that earlier code has trained" in done.stdout
    after = space.job()
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["spec"]["checkpoint"]["uri"] == f"{folder.parent}/kept"
    owners = {one["metadata"]["ownerReferences"][0]["uid"] for one in secrets_of(space)}
    assert after["metadata"]["uid"] in owners

    fresh = desk.submit("--replace", "--yes", "--from-scratch")
    assert "earlier code" not in fresh.stdout + fresh.stderr
    assert space.job()["spec"]["checkpoint"]["uri"].startswith(f"{folder.parent}/kept/from-scratch-")


def checkpoints_of_a_job_that_is_gone_are_told(desk: Desk) -> None:
    folder = desk.folder
    desk.write(digits(trainer={"entrypoint": "train:task"}, checkpoint={"uri": f"{folder.parent}/kept"}))
    (folder.parent / "kept" / desk.space.name / "digits" / "step-00000010-5f0c1234-1").mkdir(parents=True)
    assert "with weights that earlier code has trained" in desk.submit().stderr
    assert "earlier code" not in desk.submit("--name", "other").stderr


def a_job_is_not_deleted_for_one_that_cannot_be_created(desk: Desk) -> None:
    space = desk.space
    assert desk.submit().returncode == 0
    before = space.job()["metadata"]["uid"]
    space.kubectl("create", "serviceaccount", "user")
    space.kubectl("create", "role", "reader", "--verb=get,list,watch", "--resource=pods,tputrainingjobs,secrets")
    space.kubectl("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={space.name}:user")
    desk.kubeconfig = space.cluster.service_account_kubeconfig(space.name, "user")
    (desk.folder / "train.py").write_text("def task(hp): return None\n")
    for right, resource, lacking in (
        ("create", "tputrainingjobs", 'cannot create resource "secrets"'),
        ("create", "secrets", 'cannot delete resource "tputrainingjobs"'),
    ):
        space.kubectl("create", "role", resource, f"--verb={right}", f"--resource={resource}")
        space.kubectl("create", "rolebinding", resource, f"--role={resource}", f"--serviceaccount={space.name}:user")
        refused = desk.submit("--replace", "--yes")
        assert (refused.returncode, lacking in refused.stderr) == (1, True), refused.stderr
        assert "needed: get, create and delete" in refused.stderr
    assert space.job()["metadata"]["uid"] == before


def a_namespace_that_does_not_exist_is_named(desk: Desk) -> None:
    desk.space = Namespace(desk.space.cluster, "no-such-namespace")
    for arguments in ((), ("--replace", "--yes"), ("--dry-run",)):
        refused = desk.submit(*arguments)
        assert (refused.returncode, "there is no namespace 'no-such-namespace'" in refused.stderr) == (1, True)


STORIES = {
    story.__name__: story
    for story in (
        code_in_a_secret_belongs_to_its_job,
        the_code_of_a_job_cannot_change,
        a_submission_that_was_cut_off_is_finished_by_the_same_command,
        other_code_or_another_spec_is_another_job,
        what_an_earlier_job_of_the_name_has_left_is_replaced,
        a_secret_of_somebody_else_is_left_alone_and_the_job_goes_again,
        a_secret_holds_a_mebibyte_counted_before_base64,
        code_for_a_directory_is_there_before_the_job,
        a_job_without_code_is_created_as_it_stands,
        what_is_wrong_is_said_before_anything_is_created,
        a_dry_run_creates_nothing_and_says_what_the_cluster_refuses,
        a_program_reads_the_job_on_stdout_and_nothing_else,
        a_job_is_replaced_only_with_a_yes_and_says_with_which_weights_it_begins,
        checkpoints_of_a_job_that_is_gone_are_told,
        a_job_is_not_deleted_for_one_that_cannot_be_created,
        a_namespace_that_does_not_exist_is_named,
    )
}


@pytest.fixture(scope="module")
def stories(
    control_plane: ControlPlane,
    job_definition: None,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Stories]:
    """Each in a namespace of its own. They are three at a time, because they wait for the cluster."""

    def tell(story: Callable[[Desk], None]) -> None:
        with emptied_namespace(control_plane.api) as name:
            story(Desk(Namespace(control_plane, name), tmp_path_factory.mktemp("desk")))

    chosen = {name: partial(tell, STORIES[name]) for name in selected(request, STORIES)}
    with told_together(Group(chosen, at_once=3)) as told:
        yield told


@pytest.mark.parametrize("story", STORIES)
def test_with_submit(story: str, stories: Stories) -> None:
    stories.end_of(story)
