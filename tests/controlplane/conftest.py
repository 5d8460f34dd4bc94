"""A real control plane for the tests of this folder: one for the session, a namespace for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import start_kwok
from tests.cluster.namespaces import fresh_namespace


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with kwok."""
    with ControlPlane() as cluster:
        start_kwok(cluster)
        yield cluster


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    with fresh_namespace(control_plane.api) as name:
        yield name


@pytest.fixture(scope="session")
def job_definition(control_plane: ControlPlane) -> None:
    """The TPUTrainingJob is served."""
    control_plane.kubectl("apply", "-f", str(Path(__file__).parents[2] / "crds" / "tputrainingjobs.yaml"))
    control_plane.wait_established("tputrainingjobs.tpu-operator.dev")
