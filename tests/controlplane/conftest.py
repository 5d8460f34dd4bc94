"""A real control plane for the tests of this folder: one for the session, a namespace for each test."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import start_kwok
from tests.cluster.namespaces import emptied_namespace
from tests.cluster.shared import Shared
from tests.controlplane import scale
from tests.controlplane.operator_process import OperatorProcess, serving_everywhere


@pytest.fixture(scope="package")
def shared() -> Iterator[Shared[ControlPlane]]:
    with Shared(ControlPlane) as shared:
        yield shared


@pytest.fixture(scope="module")
def control_plane(shared: Shared[ControlPlane]) -> ControlPlane:
    """A control plane with kwok."""
    cluster = shared.healthy()
    shared.once("kwok", lambda: start_kwok(cluster))
    return cluster


@pytest.fixture(scope="package", autouse=True)
def measurement(request: pytest.FixtureRequest) -> Iterator[Future[scale.Measured]]:
    """For test_scale, if any of it is selected. Begins with this folder's first test, and goes on beside the others."""
    with ThreadPoolExecutor(1, thread_name_prefix="scale") as beside:
        wanted = any(item.path.name == "test_scale.py" for item in request.session.items)
        yield beside.submit(scale.measure) if wanted else Future()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    with emptied_namespace(control_plane.api) as name:
        yield name


@pytest.fixture(scope="module")
def job_definition(control_plane: ControlPlane, shared: Shared[ControlPlane]) -> None:
    """The TPUTrainingJob is served."""

    def install() -> None:
        control_plane.kubectl("apply", "-f", str(Path(__file__).parents[2] / "crds" / "tputrainingjobs.yaml"))
        control_plane.wait_established("tputrainingjobs.tpu-operator.dev")

    shared.once("the definition of the jobs", install)


@pytest.fixture(scope="module")
def served_everywhere(control_plane: ControlPlane, job_definition: None) -> Iterator[OperatorProcess]:
    with serving_everywhere(control_plane) as process:
        yield process


@pytest.fixture
def operator(served_everywhere: OperatorProcess) -> OperatorProcess:
    """See `served_everywhere`. A test may kill it."""
    if served_everywhere.exit_code is not None:
        served_everywhere.start()
    return served_everywhere
