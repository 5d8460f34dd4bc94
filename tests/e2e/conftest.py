"""A real cluster for the tests of this folder: one of two nodes for the session, a namespace for each test."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import existing as existing_cluster
from tests.cluster.api import ApiError
from tests.cluster.existing import ExistingCluster
from tests.cluster.images import Image, base_image, build_image
from tests.cluster.nodes import RealCluster
from tests.cluster.processes import wait_until

REPOSITORY = Path(__file__).parents[2]
# What the containers of the digits image find at the same path as here: the environment, and the Python it is made of.
SHARED = tuple(dict.fromkeys([REPOSITORY, Path(sys.base_prefix)]))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster | ExistingCluster]:
    """Two real nodes, node-0 and node-1, with DNS and Services; or the cluster in TEST_KUBECONFIG."""
    existing = os.environ.get(existing_cluster.SETTING)
    if existing:
        with ExistingCluster(Path(existing), tmp_path_factory.mktemp("existing")) as found:
            yield found
    else:
        with RealCluster(nodes=2, shared=SHARED) as real:
            yield real


@pytest.fixture(scope="session")
def images(cluster: RealCluster) -> None:
    """The operator's image, built from its Dockerfile, and the digits image, in both nodes under their usual names.

    An existing cluster must have them already.
    """
    if not cluster.owns_nodes:
        return
    version = importlib.metadata.version("tpu-training-operator")
    environment = {"ENVIRONMENT": sys.prefix, "REPOSITORY": str(REPOSITORY)}
    built = (
        (REPOSITORY / "operator" / "Dockerfile", f"ghcr.io/example/tpu-training-operator:{version}", {}),
        (Path(__file__).with_name("digits.Dockerfile"), "ghcr.io/example/digits:1", environment),
    )
    for dockerfile, name, build_args in built:
        image = build_image(dockerfile, REPOSITORY, name, build_args, into=cluster.directory)
        cluster.load_image(image.archive)
        image.archive.unlink()


@pytest.fixture(scope="session")
def python_image(cluster: RealCluster) -> Image:
    """Debian with Python, in both nodes."""
    image = base_image()
    cluster.load_image(image.archive)
    return image


@pytest.fixture
def namespace(cluster: RealCluster) -> Iterator[str]:
    """A fresh namespace at Pod Security level `restricted`. Its deletion is not waited for."""
    created = cluster.api.call(
        "POST",
        "/api/v1/namespaces",
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"generateName": "test-", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
    )
    name: str = created["metadata"]["name"]

    def pods_are_admitted() -> bool:
        try:
            cluster.api.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    wait_until(pods_are_admitted, timeout=30, what=f"namespace {name} has its default service account")
    yield name
    cluster.api.call("DELETE", f"/api/v1/namespaces/{name}")
