"""Which clusters need Endpoints beside EndpointSlices, by what resolves names in them."""

from typing import Any

import pytest

from tests.fakes.cluster import FakeCluster
from tests.unit.pods import pod
from tpu_training_operator.kube.errors import ApiError, Forbidden, Unavailable
from tpu_training_operator.runtime.name_servers import NameServers

COREDNS = {"name": "coredns", "image": "registry.k8s.io/coredns/coredns:v1.12.0"}
KUBE_DNS = {"name": "kubedns", "image": "gke.gcr.io/k8s-dns-kube-dns:1.23.0@sha256:0123"}
RENAMED = {"name": "dns", "image": "mirror.example:5000/k8s-dns-kube-dns:1.23.0"}
SIDECAR = {"name": "sidecar", "image": "gke.gcr.io/k8s-dns-sidecar:1.23.0"}


def server(number: int, *containers: dict[str, Any]) -> dict[str, Any]:
    body = pod(number)
    body["metadata"] |= {"name": f"dns-{number}", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    body["spec"]["containers"] = list(containers)
    return body


@pytest.mark.parametrize(
    ("servers", "needed"),
    [
        ([[COREDNS]], False),
        ([[COREDNS], [COREDNS, SIDECAR]], False),
        ([[KUBE_DNS, SIDECAR]], True),
        ([[RENAMED]], True),
        # One replaces the other.
        ([[COREDNS], [KUBE_DNS]], True),
        ([[SIDECAR]], True),
        ([], True),
    ],
)
async def test_one_form_is_enough_for_coredns_alone(servers: list[list[dict[str, Any]]], needed: bool) -> None:
    store = FakeCluster(*(server(number, *containers) for number, containers in enumerate(servers)))
    assert await NameServers(store, lambda: 0.0).need_endpoints() is needed


@pytest.mark.parametrize(
    ("error", "looks"), [(Forbidden(403, "Forbidden", "not there"), 1), (Unavailable(503, "", "not yet"), 2)]
)
async def test_who_cannot_look_writes_both(error: ApiError, looks: int) -> None:
    store = FakeCluster(server(0, COREDNS))
    store.faults["list Pod"] = error
    servers = NameServers(store, lambda: 0.0)
    assert [await servers.need_endpoints() for _ in range(2)] == [True, True]
    assert store.requests == ["list Pod"] * looks


async def test_it_looks_again_after_ten_minutes() -> None:
    store, now = FakeCluster(server(0, COREDNS)), [0.0]
    servers = NameServers(store, lambda: now[0])
    assert [await servers.need_endpoints() for _ in range(2)] == [False, False]
    store.put(server(1, KUBE_DNS))
    now[0] = 600.0
    assert await servers.need_endpoints()
    assert store.requests == ["list Pod"] * 2
