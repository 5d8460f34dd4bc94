from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import start_kwok
from tests.cluster.namespaces import fresh_namespace


@pytest.fixture(scope="package")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with kwok."""
    with ControlPlane() as cluster:
        start_kwok(cluster)
        yield cluster


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    with fresh_namespace(control_plane.api) as name:
        yield name
