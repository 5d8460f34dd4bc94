"""Code without an image of its own, on real nodes: from a folder here to workers there."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.processes import wait_until
from tests.controlplane.tpujob import tpujob
from tests.e2e.space import Space, a_space, status
from tests.e2e.together import Story
from tests.e2e.training import BUCKET
from tests.stories import Stories
from tests.wheels import write_wheel

# The first attempt dies before its first step.
TASK = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset
from tpu_trainer import Task

from parts.model import model
from tiny_rates import VERSION


def task(hp):
    assert VERSION == "1.2"
    if os.environ["TPUJOB_ATTEMPT"] == "1":
        os._exit(137)
    inputs = torch.linspace(-1, 1, 256).reshape(64, 4)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    return Task(model=model(), train=data, loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]))
"""
MODEL = "from torch import nn\n\n\ndef model():\n    return nn.Linear(4, 2)\n"
OWN_LOOP = """
import os, parts.model_name, tiny_rates
print('runs', parts.model_name.NAME, 'in', os.getcwd(), 'with', tiny_rates.VERSION)
"""

ONE_HOST, TWO_HOSTS = "v5litepod-4", "v5litepod-8"


def job(slice_: str, **trainer: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tpu-operator.dev/v1alpha1",
        "kind": "TPUTrainingJob",
        "metadata": {"name": "digits"},
        "spec": {
            "slice": {"acceleratorType": slice_, "hardware": "CPU"},
            "trainer": {"image": "localhost/tpu-examples:1", "backend": "Torch", **trainer},
            "recipe": {"globalBatchSize": 16, "trainSteps": 6, "optimizer": {"name": "sgd", "learningRate": 0.1}},
        },
    }


def submit(space: Space, directory: Path, body: dict[str, Any], files: dict[str, str], **env: str) -> str:
    """Submits the job with code that needs a package of a wheelhouse, which no image has."""
    write_wheel(directory / "code" / "wheels")
    for name, text in {**files, "requirements.txt": "tiny-rates==1.2\n"}.items():
        (directory / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "code" / name).write_text(text)
    (directory / "job.yaml").write_text(yaml.safe_dump(body))
    where = ("-n", space.name, "--kubeconfig", str(space.cluster.kubeconfig))
    file, code = str(directory / "job.yaml"), str(directory / "code")
    done = tpujob("submit", "-f", file, "--code", code, *where, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def from_a_secret_over_a_restart(space: Space, directory: Path) -> None:
    files = {"train.py": TASK, "parts/model.py": MODEL, "notes.txt": "x"}
    told = submit(space, directory, job(ONE_HOST, entrypoint="train:task"), files)
    space.kubectl("wait", "--for=condition=Succeeded", "tpujob/digits", kubectl_timeout(300))
    ended = status(space.cluster, namespace=space.name)
    sha256 = ended["resolved"]["codeSha256"]
    assert (ended["attempt"], ended["progress"]["step"]) == (2, 6)
    assert ended["progress"]["packagesSha256"] == hashlib.sha256(b"tiny-rates==1.2").hexdigest()
    assert f"sha256 {sha256}, in secret://digits-code-{sha256[:10]}" in told
    assert f"runs trainer.code, sha256 {sha256}, in /tpu-training/code/code" in space.kubectl("logs", "digits-2-0-0")

    space.kubectl("delete", "tpujob", "digits")
    wait_until(
        lambda: not [name for name in space.names("secrets") if "code" in name], timeout=90, what="the code is gone"
    )


def from_a_bucket(space: Space, storage: ObjectStorage, directory: Path) -> None:
    env = [{"name": name, "value": value} for name, value in storage.environment.items()]
    body = job(TWO_HOSTS, command=["python3", "loop.py"], env=env)
    body["spec"]["checkpoint"] = {"uri": f"gs://{BUCKET}/code-{space.name}"}
    submit(
        space, directory, body, {"loop.py": OWN_LOOP, "parts/model_name.py": "NAME = 'mine'\n"}, **storage.environment
    )
    space.kubectl("wait", "--for=condition=Succeeded", "tpujob/digits", kubectl_timeout(300))
    code = json.loads(space.kubectl("get", "tpujob", "digits", "-o", "json"))["spec"]["trainer"]["code"]
    folder = f"code-{space.name}/{space.name}/digits"
    assert code["uri"] == f"gs://{BUCKET}/{folder}/code-{code['sha256']}.tar.gz"
    assert storage.names(BUCKET, folder) == [f"{folder}/code-{code['sha256']}.tar.gz"]
    for host in range(2):
        assert "runs mine in /tpu-training/code/code with 1.2" in space.kubectl("logs", f"digits-1-0-{host}")


def tampered_with_or_missing(space: Space) -> None:
    sha256 = hashlib.sha256(b"as submitted").hexdigest()
    space.kubectl("create", "secret", "generic", "tampered", "--from-literal=code.tar.gz=other")
    for name, secret in (("tampered", "tampered"), ("missing", "nowhere")):
        body = job(ONE_HOST, entrypoint="train:task", code={"uri": f"secret://{secret}", "sha256": sha256})
        body["metadata"]["name"] = name
        space.kubectl("apply", "-f", "-", input=yaml.safe_dump(body))

    space.kubectl("wait", "--for=condition=Failed", "tpujob/tampered", kubectl_timeout(120))
    failure = status(space.cluster, "tampered", space.name)["lastFailure"]
    assert (failure["class"], failure["attempt"]) == ("UserError", 1)
    assert failure["message"].startswith("trainer.code.sha256: secret:")

    def why() -> str:
        return str(status(space.cluster, "missing", space.name).get("conditions"))

    wait_until(lambda: 'secret "nowhere" not found' in why(), timeout=120, what="the missing Secret is named")


def in_secret(cluster: Cluster, _: ObjectStorage) -> None:
    with a_space(cluster) as space, tempfile.TemporaryDirectory() as directory:
        from_a_secret_over_a_restart(space, Path(directory))


def in_bucket(cluster: Cluster, storage: ObjectStorage) -> None:
    with a_space(cluster) as space, tempfile.TemporaryDirectory() as directory:
        from_a_bucket(space, storage, Path(directory))


STORIES = {
    "code in a secret": Story(in_secret, trains=True, stores=False),
    "code in a bucket": Story(in_bucket),
    "code that is wrong": Story.of_a_space(tampered_with_or_missing),
}


def test_a_job_trains_with_code_from_a_secret_over_a_restart(stories: Stories) -> None:
    stories.end_of("code in a secret")


def test_a_loop_of_the_users_own_runs_from_a_bucket(stories: Stories) -> None:
    stories.end_of("code in a bucket")


def test_code_that_was_tampered_with_or_is_missing_is_told_and_nothing_is_run_again(stories: Stories) -> None:
    stories.end_of("code that is wrong")
