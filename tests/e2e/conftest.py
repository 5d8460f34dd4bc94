"""A real cluster for the tests of this folder: one of two nodes for the session, a namespace for each test."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import dropwhile
from pathlib import Path

import pytest

from tests.cluster import project_images
from tests.cluster.api import Object
from tests.cluster.cluster import KUBECONFIG_SETTING, Cluster, chosen
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.images import Image, base_image
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.shared import Shared
from tests.conftest import MEASURED
from tests.e2e import ladder
from tests.e2e.chronicle import Recoveries
from tests.e2e.readme import cluster_commands
from tests.e2e.space import REPOSITORY, RESTRICTED, Space, a_space
from tests.e2e.together import all_told, stories_of
from tests.e2e.training import BUCKET, Losses, result
from tests.stories import Stories

OPERATOR_NAMESPACE = "tpu-system"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts this folder's tests that need no operator first, because its image is built meanwhile."""
    own = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted(
        (items[index] for index in own), key=lambda item: "quick_start" in getattr(item, "fixturenames", ())
    )
    for index, item in zip(own, ordered, strict=True):
        items[index] = item


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Cluster]]:
    with Shared(lambda: chosen(2, project_images.SHARED, tmp_path_factory.mktemp("cluster"))) as shared:
        yield shared


@pytest.fixture(scope="module")
def cluster(shared: Shared[Cluster]) -> Cluster:
    """Two real nodes with DNS and Services, or whatever the environment chooses (see `tests/cluster/cluster.py`)."""
    return shared.healthy()


@pytest.fixture(scope="package", autouse=True)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[list[Image]]]:
    """The images of README's commands, if a test wants them: built while the tests run that want none."""
    wanted = any("quick_start" in getattr(item, "fixturenames", ()) for item in request.session.items)
    with ThreadPoolExecutor(1, thread_name_prefix="images") as beside:
        if wanted and KUBECONFIG_SETTING not in os.environ:
            folder = tmp_path_factory.mktemp("images")
            yield beside.submit(project_images.build, folder)
            shutil.rmtree(folder)
        else:
            yield Future()


@pytest.fixture(scope="module")
def images(
    cluster: Cluster, shared: Shared[Cluster], built: Future[list[Image]], request: pytest.FixtureRequest
) -> None:
    """Of README's commands. An existing cluster must have them already."""
    if cluster.owns_nodes:
        request.getfixturevalue("python_image")
        shared.once("loading images", lambda: project_images.load(cluster, built.result()))


@pytest.fixture(scope="module")
def python_image(cluster: Cluster, shared: Shared[Cluster]) -> Image:
    """Debian with Python, in both nodes."""
    image = base_image()
    shared.once("loading Python", lambda: cluster.load_image(image.archive))
    return image


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """At Pod Security level `restricted`."""
    with fresh_namespace(cluster.api, RESTRICTED) as name:
        yield name


@pytest.fixture(scope="module")
def quick_start(cluster: Cluster, shared: Shared[Cluster], images: None) -> dict[str, str]:
    """What README's commands printed, see `_quick_start`."""
    return shared.once("README's commands", lambda: _quick_start(cluster))


def _quick_start(cluster: Cluster) -> dict[str, str]:
    """Runs README's commands in order; returns what each printed, by its first three words.

    "operator", "workers": the operator's pods and the job's afterwards, as kubectl prints them in JSON. A node that a
    later test stops loses its pods.
    """
    cluster.wait_schedulable()
    if cluster.owns_nodes:
        _leave_room_for_three_workers_on_each_node(cluster)
    cluster.kubectl("create", "namespace", OPERATOR_NAMESPACE)
    for namespace in (OPERATOR_NAMESPACE, "default"):
        cluster.kubectl("label", "namespace", namespace, *(f"{key}={value}" for key, value in RESTRICTED.items()))
    printed = {}
    for program, *words in cluster_commands():
        run = {"helm": cluster.helm, "kubectl": cluster.kubectl}[program]
        words = [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in words]
        printed[" ".join([program, *words][:3])] = run(*_patiently(words)).stdout
    operator = cluster.kubectl("--namespace", OPERATOR_NAMESPACE, "get", "pods", "-o", "json")
    workers = cluster.kubectl("get", "pods", "-o", "json")
    return printed | {"operator": operator.stdout, "workers": workers.stdout}


def _patiently(words: list[str]) -> list[str]:
    """The command, with a limit that grows with the machine's load if it waits for something."""
    if words[0] not in ("test", "wait"):
        return words
    return [*(word for word in words if not word.startswith("--timeout=")), kubectl_timeout(600)]


def _leave_room_for_three_workers_on_each_node(cluster: Cluster) -> None:
    """So that the four train on both nodes. The scheduler prefers to spread the pods of a Service, but does not when it
    sees the Service later than the pods, which happens on a busy machine."""
    found = json.loads(cluster.kubectl("get", "nodes", "-o", "json").stdout)["items"]
    processors = [item["status"]["allocatable"]["cpu"] for item in found if item["metadata"]["name"] in cluster.nodes]
    least = min(int(text[:-1]) if text.endswith("m") else 1000 * int(text) for text in processors)
    usual = {"type": "Container", "defaultRequest": {"cpu": f"{int(least * 0.3)}m"}}
    limits = {"kind": "LimitRange", "apiVersion": "v1", "metadata": {"name": "spread"}, "spec": {"limits": [usual]}}
    cluster.kubectl("apply", "--namespace=default", "-f", "-", input=json.dumps(limits))


@pytest.fixture
def space(cluster: Cluster, quick_start: dict[str, str]) -> Iterator[Space]:
    """A restricted namespace in a cluster where the operator runs."""
    with a_space(cluster) as space:
        yield space


@pytest.fixture(scope="module")
def storage(cluster: Cluster, shared: Shared[Cluster], tmp_path_factory: pytest.TempPathFactory) -> ObjectStorage:
    """Object storage with BUCKET, at an address that pods can reach."""
    if not cluster.owns_nodes:
        pytest.skip("hurts nodes and what runs on them; this cluster is somebody else's")
    directory = tmp_path_factory.mktemp("object-storage")
    storage = shared.keep("object storage", lambda: ObjectStorage(directory, cluster.address))
    shared.once("a bucket", lambda: storage.make_bucket(BUCKET))
    return storage


@pytest.fixture(scope="module")
def stories(
    cluster: Cluster, shared: Shared[Cluster], quick_start: dict[str, str], request: pytest.FixtureRequest
) -> Stories:
    """What becomes of the jobs of this module and all later ones that have such; they start when it is first asked."""
    own = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    items = list(dropwhile(lambda item: item.path != request.path, own))
    wanted = stories_of(items)
    if any({"undisturbed", "undisturbed_losses"} & set(getattr(item, "fixturenames", ())) for item in items):
        wanted[ladder.LEARNS] = ladder.STORIES[ladder.LEARNS]
    storage = request.getfixturevalue("storage") if cluster.owns_nodes else None
    return shared.keep("stories", lambda: all_told(wanted, cluster, storage))


@pytest.fixture
def alone(stories: Stories) -> None:
    """No story is being told: for tests that take away nodes, the operator or the API server."""
    stories.wait()


@pytest.fixture(scope="module")
def undisturbed(stories: Stories) -> Object:
    """The result of an undisturbed training, which has gone up a ladder before."""
    told: ladder.Ascent = stories.end_of(ladder.LEARNS)
    assert (told.status["state"], told.told.attempts()) == ("Succeeded", [1, 2]), told.told.summary()
    return result(told.status)


@pytest.fixture(scope="module")
def undisturbed_losses(stories: Stories, undisturbed: Object) -> Losses:
    """Of every step of the same training."""
    told: ladder.Ascent = stories.end_of(ladder.LEARNS)
    return told.losses


@pytest.fixture
def recoveries(record_property: Callable[[str, object], None]) -> Iterator[Recoveries]:
    """Records a test's measurement, to be shown at the end of the run; no test asserts it."""
    measured: Recoveries = {}
    yield measured
    for name, took in measured.items():
        stopping = f" and {took.stopping:.2f} s for the kubelets to end the old workers" if took.stopping else ""
        text = f"{name:<40} first failure seen -> all new pods there: {took.operator:.2f} s of the operator{stopping}"
        record_property(MEASURED, text)
