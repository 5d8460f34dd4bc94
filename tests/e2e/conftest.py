"""A real cluster for the tests of this folder: one of two nodes for the session, a namespace for each test."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster import existing as existing_cluster
from tests.cluster import project_images
from tests.cluster.api import Object
from tests.cluster.existing import ExistingCluster
from tests.cluster.images import Image, base_image
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.nodes import RealCluster
from tests.cluster.object_storage import ObjectStorage
from tests.conftest import MEASURED
from tests.e2e.chronicle import Recoveries
from tests.e2e.readme import cluster_commands
from tests.e2e.space import REPOSITORY, RESTRICTED, Space, a_space
from tests.e2e.together import Story, all_told, stories_of
from tests.e2e.training import BUCKET, Losses, result, started
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster | ExistingCluster]:
    """Two real nodes, node-0 and node-1, with DNS and Services; or the cluster in TEST_KUBECONFIG."""
    existing = os.environ.get(existing_cluster.SETTING)
    if existing:
        with ExistingCluster(Path(existing), tmp_path_factory.mktemp("existing")) as found:
            yield found
    else:
        with RealCluster(nodes=2, shared=project_images.SHARED) as real:
            yield real


@pytest.fixture(scope="package", autouse=True)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[list[Image]]]:
    """The images of README's commands, if a test wants them: built while the tests run that want none."""
    wanted = any("quick_start" in getattr(item, "fixturenames", ()) for item in request.session.items)
    with ThreadPoolExecutor(1, thread_name_prefix="images") as beside:
        if wanted and existing_cluster.SETTING not in os.environ:
            yield beside.submit(project_images.build, tmp_path_factory.mktemp("images"))
        else:
            yield Future()


@pytest.fixture(scope="package")
def images(cluster: RealCluster, built: Future[list[Image]]) -> None:
    """Of README's commands. An existing cluster must have them already."""
    if cluster.owns_nodes:
        project_images.load(cluster, built.result())


@pytest.fixture(scope="package")
def python_image(cluster: RealCluster) -> Image:
    """Debian with Python, in both nodes."""
    image = base_image()
    cluster.load_image(image.archive)
    return image


@pytest.fixture
def namespace(cluster: RealCluster) -> Iterator[str]:
    """At Pod Security level `restricted`."""
    with fresh_namespace(cluster.api, RESTRICTED) as name:
        yield name


@pytest.fixture(scope="package")
def quick_start(cluster: RealCluster, images: None) -> dict[str, str]:
    """Runs README's commands in order; returns what each printed, by its first three words.

    "operator", "workers": the operator's pods and the job's afterwards, as kubectl prints them in JSON. A node that a
    later test stops loses its pods.
    """
    cluster.kubectl("create", "namespace", OPERATOR_NAMESPACE)
    for namespace in (OPERATOR_NAMESPACE, "default"):
        cluster.kubectl("label", "namespace", namespace, *(f"{key}={value}" for key, value in RESTRICTED.items()))
    printed = {}
    for program, *words in cluster_commands():
        run = {"helm": cluster.helm, "kubectl": cluster.kubectl}[program]
        words = [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in words]
        printed[" ".join([program, *words][:3])] = run(*words).stdout
    operator = cluster.kubectl("--namespace", OPERATOR_NAMESPACE, "get", "pods", "-o", "json")
    workers = cluster.kubectl("get", "pods", "-o", "json")
    return printed | {"operator": operator.stdout, "workers": workers.stdout}


@pytest.fixture
def space(cluster: RealCluster, quick_start: dict[str, str]) -> Iterator[Space]:
    """A restricted namespace in a cluster where the operator runs."""
    with a_space(cluster) as space:
        yield space


@pytest.fixture(scope="package")
def storage(cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    """Object storage with BUCKET, at an address that pods can reach."""
    if not cluster.owns_nodes:
        pytest.skip("hurts nodes and what runs on them; this cluster is somebody else's")
    with ObjectStorage(tmp_path_factory.mktemp("object-storage"), cluster.address) as storage:
        storage.make_bucket(BUCKET)
        yield storage


@pytest.fixture(scope="package")
def stories(cluster: RealCluster, quick_start: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Stories]:
    """What becomes of the jobs of all modules that have such; they start when the first one is requested."""
    items = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    wanted = stories_of(items)
    if any({"undisturbed", "undisturbed_losses"} & set(getattr(item, "fixturenames", ())) for item in items):
        wanted["undisturbed"] = Story(_tell_undisturbed, trains=True)
    storage = request.getfixturevalue("storage") if cluster.owns_nodes else None
    with all_told(wanted, cluster, storage) as told:
        yield told


@pytest.fixture
def alone(stories: Stories) -> None:
    """No story is being told: for tests that take away nodes, the operator or the API server."""
    stories.wait()


def _tell_undisturbed(cluster: RealCluster, storage: ObjectStorage) -> tuple[Object, Losses]:
    with started(cluster, storage) as training:
        status = training.wait_ended()
        assert (status["state"], status["attempt"]) == ("Succeeded", 1), training.chronicle.summary()
        return result(status), training.losses()


@pytest.fixture(scope="package")
def undisturbed(stories: Stories) -> Object:
    """The result of an undisturbed training."""
    found: Object = stories.end_of("undisturbed")[0]
    return found


@pytest.fixture(scope="package")
def undisturbed_losses(stories: Stories) -> Losses:
    """Of every step of the same training."""
    found: Losses = stories.end_of("undisturbed")[1]
    return found


@pytest.fixture
def recoveries(record_property: Callable[[str, object], None]) -> Iterator[Recoveries]:
    """Records a test's measurement, to be shown at the end of the run; no test asserts it."""
    measured: Recoveries = {}
    yield measured
    for name, took in measured.items():
        stopping = f" and {took.stopping:.2f} s for the kubelets to end the old workers" if took.stopping else ""
        text = f"{name:<40} first failure seen -> all new pods there: {took.operator:.2f} s of the operator{stopping}"
        record_property(MEASURED, text)
