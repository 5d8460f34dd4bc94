"""How often anybody writes the addresses behind a gang's names, and what they say."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self

import pytest

from tests.cluster.api import ApiClient, Object
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import cpu_nodes_for
from tests.cluster.processes import wait_until
from tests.controlplane.jobs import Namespace, digits
from tests.controlplane.operator_process import OperatorProcess

# More than the 100 addresses that Kubernetes itself would put into one EndpointSlice.
HOSTS = 128
LARGE = {"acceleratorType": "v5p-1024", "hardware": "CPU"}
SECONDS = 300


@pytest.fixture(scope="module")
def cpu_nodes(control_plane: ControlPlane) -> Iterator[None]:
    with cpu_nodes_for(control_plane, 8):
        yield


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, cpu_nodes: None, namespace: str) -> Namespace:
    return Namespace(control_plane, namespace)


class Addresses:
    """Every version of every EndpointSlice and Endpoints in one namespace: a context manager, entered before there is
    any."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self._paths: dict[str, Object] = {
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices": {
                "addressType": "IPv4",
                "endpoints": [],
            },
            f"/api/v1/namespaces/{namespace}/endpoints": {},
        }
        self._marks = 0
        self._watches = ExitStack()
        self._followers: list[threading.Thread] = []
        self.events: list[Object] = []

    def __enter__(self) -> Self:
        for path in self._paths:
            events = self._watches.enter_context(self._api.watch(path))
            follower = threading.Thread(target=self._follow, args=(events,), name=f"follows {path}")
            follower.start()
            self._followers.append(follower)
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()
        for follower in self._followers:
            follower.join()

    def _follow(self, events: Iterator[Object]) -> None:
        for event in events:
            self.events.append(event)

    def writes(self) -> Counter[str]:
        """How often each kind was written up to now. Markers show that the watches have come so far."""
        self._marks += 1
        name = f"marker-{self._marks}"
        for path, content in self._paths.items():
            self._api.call("POST", path, {"metadata": {"name": name}, **content})
        wait_until(
            lambda: len(self._named(name)) == len(self._paths), timeout=SECONDS, what="both watches see a marker"
        )
        seen = [event for event in self.events if not event["object"]["metadata"]["name"].startswith("marker-")]
        return Counter(f"{event['type']} {event['object']['kind']}" for event in seen)

    def _named(self, name: str) -> list[Object]:
        return [event for event in self.events if event["object"]["metadata"]["name"] == name]


def endpoint_slices(space: Namespace) -> list[Object]:
    found = space.cluster.api.call("GET", f"/apis/discovery.k8s.io/v1/namespaces/{space.name}/endpointslices")
    listed: list[Object] = found["items"]
    return listed


def addresses_of(space: Namespace, attempt: int) -> dict[str, str]:
    """By host name, the address that each worker's pod has."""
    pods = space.pods()
    workers = [pod for pod in pods if pod["metadata"]["name"].startswith(f"digits-{attempt}-")]
    return {pod["spec"]["hostname"]: pod["status"]["podIP"] for pod in workers}


def test_the_addresses_of_a_large_gang_are_written_a_handful_of_times(
    control_plane: ControlPlane, space: Namespace, operator: OperatorProcess
) -> None:
    with Addresses(control_plane.api, space.name) as addresses:
        space.apply(digits(slice=LARGE))
        space.wait_for_state("Running", attempt=1, timeout=SECONDS)
        first = addresses.writes()
        space.finish("digits-1-0-7", exit_code=137)
        space.wait_for_state("Running", attempt=2, timeout=SECONDS)
        restart = addresses.writes() - first
    assert first == {"ADDED EndpointSlice": 1, "ADDED Endpoints": 1}
    assert restart == {"DELETED EndpointSlice": 1, "ADDED EndpointSlice": 1, "MODIFIED Endpoints": 1}
    (found,) = (body for body in endpoint_slices(space) if not body["metadata"]["name"].startswith("marker-"))
    assert {one["hostname"]: one["addresses"][0] for one in found["endpoints"]} == addresses_of(space, 2)
    assert len(found["endpoints"]) == HOSTS
