"""helm, and a real control plane for what only an API server can decide: one of each for the session."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.chart.cluster import Cluster
from tests.chart.helm import NAMESPACE, Helm
from tests.chart.switches import NAMESPACES, OTHER
from tests.cluster import binaries
from tests.cluster.control_plane import ControlPlane
from tests.cluster.shared import Shared


@pytest.fixture(scope="package")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(binaries.ensure("helm")["helm"], tmp_path_factory.mktemp("helm-home"))


@pytest.fixture(scope="package")
def shared() -> Iterator[Shared[ControlPlane]]:
    with Shared(ControlPlane) as shared:
        yield shared


@pytest.fixture(scope="module")
def control_plane(shared: Shared[ControlPlane]) -> ControlPlane:
    """Has no nodes: these tests ask what is accepted and granted, not what runs."""
    return shared.healthy()


@pytest.fixture(scope="module")
def namespaces(control_plane: ControlPlane, shared: Shared[ControlPlane]) -> None:
    for namespace in (NAMESPACE, OTHER, *NAMESPACES):
        shared.once(f"namespace {namespace}", partial(control_plane.kubectl, "create", "namespace", namespace))


@pytest.fixture
def cluster(control_plane: ControlPlane, helm: Helm, namespaces: None) -> Iterator[Cluster]:
    """A cluster without the chart, before and after."""
    cluster = Cluster(control_plane, helm)
    yield cluster
    cluster.clear()
