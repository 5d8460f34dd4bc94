"""A real control plane for the tests of this folder: one for the session, a namespace for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import start_kwok
from tests.cluster.processes import wait_until


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with kwok."""
    with ControlPlane() as cluster:
        start_kwok(cluster)
        yield cluster


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace that pods can be created in. Its deletion is not waited for; its name is not reused."""
    created = control_plane.api.call(
        "POST",
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "test-"}},
    )
    name: str = created["metadata"]["name"]

    def pods_are_admitted() -> bool:
        try:
            control_plane.api.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    wait_until(pods_are_admitted, timeout=30, what=f"namespace {name} has its default service account")
    yield name
    control_plane.api.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def job_definition(control_plane: ControlPlane) -> None:
    """The TPUTrainingJob is served."""
    control_plane.kubectl("apply", "-f", str(Path(__file__).parents[2] / "crds" / "tputrainingjobs.yaml"))
    control_plane.kubectl("wait", "--for=condition=Established", "crd/tputrainingjobs.tpu-operator.dev")
