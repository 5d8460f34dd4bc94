"""`tpujob check-slice` on two real nodes: a slice without faults is fit, and a fault is found on each host."""

import json

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.controlplane.tpujob import tpujob
from tests.e2e.space import JOBS, Space, a_space
from tests.e2e.together import Story
from tests.e2e.training import BUCKET
from tests.stories import Stories

# Two hosts. A waiting limit, not an expectation: many trainings share a small machine.
USUAL = ["v5litepod-8", "--image", "localhost/tpu-examples:1", "--timeout", "900", "-o", "json"]
ON_CPU = {"slice.hardware": "CPU", "trainer.backend": "Torch"}
READ_ONLY = {
    "trainer.volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    "trainer.volumeMounts": [{"name": "shm", "mountPath": "/dev/shm", "readOnly": True}],
}


def check(space: Space, values: Object) -> tuple[int, Object]:
    """The exit status and the table."""
    texts = {path: value if isinstance(value, str) else json.dumps(value) for path, value in (ON_CPU | values).items()}
    given = [f"--set={path}={text}" for path, text in texts.items()]
    where = ["--namespace", space.name, "--kubeconfig", str(space.cluster.kubeconfig)]
    done = tpujob("check-slice", *USUAL, *given, *where)
    assert done.stdout, done.stderr
    table: Object = json.loads(done.stdout)
    return done.returncode, table


def a_slice_without_faults(cluster: Cluster, storage: ObjectStorage) -> None:
    with a_space(cluster) as space:
        env = [{"name": name, "value": value} for name, value in storage.environment.items()]
        place = {"checkpoint.uri": f"gs://{BUCKET}/{space.name}"}
        code, table = check(space, {"trainer.env": env, **place})
        assert (code, table["fit"]) == (0, True), table
        verdicts = {(line["section"], line["name"]): line["verdict"] for line in table["lines"]}
        assert "Failed" not in verdicts.values()
        tried = [("Pod", "/dev/shm"), ("Network", "names and ports"), ("Storage", "storage"), ("Run", "bit for bit")]
        assert {verdicts[line] for line in tried} == {"Ok"}, table
        assert space.names(JOBS) == []


def shared_memory_that_is_read_only(space: Space) -> None:
    code, table = check(space, READ_ONLY)
    assert (code, table["fit"]) == (1, False), table
    failed = [line for line in table["lines"] if line["verdict"] == "Failed"]
    assert {line["name"] for line in failed} == {"/dev/shm"}
    assert {line["host"].rpartition("-")[2] for line in failed} == {"0", "1"}
    assert {line["node"] for line in failed} <= set(space.cluster.nodes)
    assert space.names(JOBS) == []


STORIES = {
    "a fit slice": Story(a_slice_without_faults, trains=True),
    "read-only shared memory": Story.of_a_space(shared_memory_that_is_read_only),
}


def test_a_slice_without_faults_is_fit(stories: Stories) -> None:
    stories.end_of("a fit slice")


def test_shared_memory_that_cannot_be_written_is_found_on_each_host(stories: Stories) -> None:
    stories.end_of("read-only shared memory")
