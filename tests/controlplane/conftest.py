"""A real control plane for the tests of this folder: one for the session, a namespace for each test."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import start_kwok
from tests.cluster.processes import wait_until
from tests.cluster.toolchain import ToolchainMissing


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with kwok. Skips without the toolchain that builds it; in CI that is a failure."""
    if sys.platform != "linux":
        pytest.skip("the test cluster needs Linux (/proc, prctl)")
    cluster = ControlPlane()
    try:
        cluster.start()
    except ToolchainMissing as missing:
        _without_toolchain(missing)
    try:
        start_kwok(cluster)
        yield cluster
    finally:
        cluster.stop()


def _without_toolchain(missing: ToolchainMissing) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(str(missing))
    pytest.skip(str(missing))


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
