"""A real cluster for the tests of this folder: one of two nodes for the session, a namespace for each test."""

import os
from collections.abc import Callable, Iterator
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
from tests.e2e.space import REPOSITORY, Space
from tests.e2e.training import BUCKET, result, started

RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
OPERATOR_NAMESPACE = "tpu-system"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster | ExistingCluster]:
    """Two real nodes, node-0 and node-1, with DNS and Services; or the cluster in TEST_KUBECONFIG."""
    existing = os.environ.get(existing_cluster.SETTING)
    if existing:
        with ExistingCluster(Path(existing), tmp_path_factory.mktemp("existing")) as found:
            yield found
    else:
        with RealCluster(nodes=2, shared=project_images.SHARED) as real:
            yield real


@pytest.fixture(scope="session")
def images(cluster: RealCluster) -> None:
    """Of README's commands. An existing cluster must have them already."""
    if cluster.owns_nodes:
        project_images.load(cluster)


@pytest.fixture(scope="session")
def python_image(cluster: RealCluster) -> Image:
    """Debian with Python, in both nodes."""
    image = base_image()
    cluster.load_image(image.archive)
    return image


@pytest.fixture
def namespace(cluster: RealCluster) -> Iterator[str]:
    """At Pod Security level `restricted`."""
    with fresh_namespace(cluster.api, {"pod-security.kubernetes.io/enforce": "restricted"}) as name:
        yield name


@pytest.fixture(scope="session")
def quick_start(cluster: RealCluster, images: None) -> dict[str, str]:
    """Runs README's commands in order; returns what each printed, by its first three words.

    "operator": the operator's pods afterwards, as kubectl prints them in JSON.
    """
    cluster.kubectl("create", "namespace", OPERATOR_NAMESPACE)
    for namespace in (OPERATOR_NAMESPACE, "default"):
        cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    printed = {}
    for program, *words in cluster_commands():
        run = {"helm": cluster.helm, "kubectl": cluster.kubectl}[program]
        words = [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in words]
        printed[" ".join([program, *words][:3])] = run(*words).stdout
    operator = cluster.kubectl("--namespace", OPERATOR_NAMESPACE, "get", "pods", "-o", "json")
    return printed | {"operator": operator.stdout}


@pytest.fixture
def space(cluster: RealCluster, quick_start: dict[str, str], namespace: str) -> Iterator[Space]:
    """A restricted namespace in a cluster where the operator runs."""
    space = Space(cluster, namespace)
    yield space
    space.kubectl("delete", "tpujob", "--all", "--wait=false")


@pytest.fixture(scope="session")
def storage(cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    """Object storage with BUCKET, at an address that pods can reach."""
    if not cluster.owns_nodes:
        pytest.skip("hurts nodes and what runs on them; this cluster is somebody else's")
    with ObjectStorage(tmp_path_factory.mktemp("object-storage"), cluster.address) as storage:
        storage.make_bucket(BUCKET)
        yield storage


@pytest.fixture(scope="session")
def undisturbed(cluster: RealCluster, quick_start: dict[str, str], storage: ObjectStorage) -> Object:
    """The result of an undisturbed training."""
    with started(cluster, storage) as training:
        status = training.wait_ended()
        assert (status["state"], status["attempt"]) == ("Succeeded", 1), training.chronicle.summary()
        return result(status)


@pytest.fixture
def recoveries(record_property: Callable[[str, object], None]) -> Iterator[Recoveries]:
    """Records a test's measurement, to be shown at the end of the run; no test asserts it."""
    measured: Recoveries = {}
    yield measured
    for name, took in measured.items():
        stopping = f" and {took.stopping:.2f} s for the kubelets to end the old workers" if took.stopping else ""
        text = f"{name:<40} first failure seen -> all new pods there: {took.operator:.2f} s of the operator{stopping}"
        record_property(MEASURED, text)
