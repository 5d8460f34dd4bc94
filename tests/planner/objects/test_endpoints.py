"""When the names of a gang's workers begin to resolve, where to, and when they stop."""

from dataclasses import replace
from typing import Any

import pytest

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import Operator, actions, look, one_pass
from tests.planner.story import (
    WORKERS,
    all_are_ready,
    described,
    get_ready,
    given_a_created_gang,
    given_a_job,
    given_a_running_gang,
    is_seen_to_fail,
    ready_message,
    reason,
    some_passes,
    until_running,
)
from tests.unit.jobs import resolved
from tests.unit.pods import pod as worker_pod
from tests.unit.pods import seen
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.job.naming import service_name
from tpu_training_operator.domain.objects.actions import Publish
from tpu_training_operator.domain.objects.endpoints import endpoint_slice_names, publication
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import ApiError, Forbidden, InvalidRequest

PUBLICATION = "publish EndpointSlice digits-0, Endpoints digits"


def addressed(attempt: int = 1, *lists: list[str]) -> list[Any]:
    """Workers with these addresses."""
    bodies = [worker_pod(host, attempt=attempt, node=f"node-{host}") for host in range(len(lists))]
    for body, addresses in zip(bodies, lists, strict=True):
        body["status"]["podIPs"] = [{"ip": address} for address in addresses]
    return seen(*bodies)


def published(*lists: list[str]) -> tuple[Object, ...] | None:
    """What four workers with these addresses publish."""
    job, resolution = resolved()
    made = publication(job, resolution.layout, addressed(1, *lists), None)
    return None if made is None else made.bodies


FOUR = [["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"], ["10.0.0.4"]]


# What is written.


def test_an_endpoint_leads_from_the_name_of_a_worker_to_its_pod() -> None:
    bodies = published(*FOUR)
    assert bodies is not None
    endpoint_slice, endpoints = bodies
    assert endpoint_slice["endpoints"][2] == {
        "addresses": ["10.0.0.3"],
        "conditions": {"ready": True},
        "hostname": "1-2",
        "nodeName": "node-2",
        "targetRef": {"kind": "Pod", "namespace": "default", "name": "digits-1-0-2", "uid": "uid-of-digits-1-0-2"},
    }
    assert endpoint_slice["addressType"] == "IPv4"
    assert endpoint_slice["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "tpu-training-operator",
        "app.kubernetes.io/component": "worker",
        "tpu-operator.dev/job-name": "digits",
        "kubernetes.io/service-name": "digits",
        "endpointslice.kubernetes.io/managed-by": "tpu-training-operator",
        "service.kubernetes.io/headless": "",
    }
    assert endpoints["subsets"][0]["addresses"][2] == {"ip": "10.0.0.3", "hostname": "1-2"}
    # Otherwise the controller manager copies them into slices of its own.
    assert endpoints["metadata"]["labels"]["endpointslice.kubernetes.io/skip-mirror"] == "true"
    owners = [body["metadata"]["ownerReferences"][0]["uid"] for body in bodies]
    assert owners == [resolved()[0].uid] * 2


@pytest.mark.parametrize(("hosts", "objects"), [(4, 1), (1000, 1), (1001, 2), (2304, 3), (5000, 5)])
def test_an_endpoint_slice_holds_at_most_a_thousand_endpoints(hosts: int, objects: int) -> None:
    job, resolution = resolved({"spec.slice.acceleratorType": "v5litepod-4"})
    layout = replace(resolution.layout, slices=hosts)
    bodies = [worker_pod(slice_index=index, node=f"node-{index}") for index in range(hosts)]
    for index, body in enumerate(bodies):
        body["status"]["podIPs"] = [{"ip": f"10.0.{index // 256}.{index % 256}"}]
    made = publication(job, layout, seen(*bodies), None)
    *found, endpoints = made.bodies
    assert [body["metadata"]["name"] for body in found] == endpoint_slice_names("digits", layout)
    names = [endpoint["hostname"] for body in found for endpoint in body["endpoints"]]
    assert names == [f"1-{host}" for host in range(hosts)]
    assert (len(found), max(len(body["endpoints"]) for body in found)) == (objects, min(hosts, 1000))
    assert len(endpoints["subsets"][0]["addresses"]) == hosts


def test_a_single_host_has_no_names() -> None:
    job, resolution = resolved({"spec.slice.acceleratorType": "v5litepod-4"})
    assert publication(job, resolution.layout, addressed(1, ["10.0.0.1"]), None) is None
    assert endpoint_slice_names("digits", resolution.layout) == []


# Which address of a worker.

V6 = [[f"fd00::{host}"] for host in range(1, 5)]


@pytest.mark.parametrize(
    ("addresses", "kind", "chosen"),
    [
        (FOUR, "IPv4", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
        (V6, "IPv6", ["fd00::1", "fd00::2", "fd00::3", "fd00::4"]),
        ([a + b for a, b in zip(FOUR, V6, strict=True)], "IPv4", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
        ([b + a for a, b in zip(FOUR, V6, strict=True)], "IPv6", ["fd00::1", "fd00::2", "fd00::3", "fd00::4"]),
        ([FOUR[0], *(b + a for a, b in zip(FOUR[1:], V6[1:], strict=True))], "IPv4", [a[0] for a in FOUR]),
        ([["FD00:0::1"], *V6[1:]], "IPv6", ["fd00::1", "fd00::2", "fd00::3", "fd00::4"]),
    ],
    ids=["IPv4", "IPv6", "dual stack", "dual stack, IPv6 first", "another order on other hosts", "not canonical"],
)
def test_all_workers_are_found_by_the_first_family_of_worker_0(
    addresses: list[list[str]], kind: str, chosen: list[str]
) -> None:
    bodies = published(*addresses)
    assert bodies[0]["addressType"] == kind
    assert [endpoint["addresses"] for endpoint in bodies[0]["endpoints"]] == [[one] for one in chosen]


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        [""],
        ["None"],
        ["10.0.0"],
        ["10.0.0.256"],
        ["010.0.0.1"],
        ["0.0.0.0"],
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["224.0.0.1"],
        ["::ffff:10.0.0.2"],
        ["fe80::1%eth0"],
        ["fd00::2"],
        ["evil.example.com"],
        ["x" * 1_000_000],
    ],
    ids=lambda value: "".join(value)[:20] or "none",
)
def test_a_worker_without_a_usable_address_is_waited_for(addresses: list[str]) -> None:
    assert published(FOUR[0], addresses, *FOUR[2:]) is None


@pytest.mark.parametrize("odd", [None, [], [{}], [{"ip": None}]])
def test_an_odd_list_of_addresses_is_none(odd: Any) -> None:
    job, resolution = resolved()
    bodies = [worker_pod(host) for host in range(4)]
    for body in bodies:
        body["status"]["podIPs"] = odd
    assert publication(job, resolution.layout, seen(*bodies), None) is None


# When.


def starts_all_but(cluster: ModelCluster, *names: str) -> None:
    for name, pod in cluster.pods.items():
        if name not in names:
            kubelet.make_ready(cluster, pod)


def test_names_are_published_once_the_last_worker_has_its_address_before_it_is_ready() -> None:
    cluster = given_a_created_gang()
    starts_all_but(cluster, WORKERS[3])
    assert described(one_pass(cluster)) == []
    kubelet.give_address(cluster, cluster.pods[WORKERS[3]])
    assert described(one_pass(cluster)) == [PUBLICATION]
    assert cluster.names == {f"1-{host}": cluster.pods[name]["metadata"]["uid"] for host, name in enumerate(WORKERS)}
    assert cluster.status.state == State.STARTING


def test_an_operator_publishes_the_same_addresses_once() -> None:
    cluster = given_a_created_gang()
    for pod in cluster.pods.values():
        kubelet.start(cluster, pod)
    operator = Operator(cluster)
    assert operator.work().effects[:2] == ["create EndpointSlice/digits-0", "create Endpoints/digits"]
    assert operator.work().effects == []


def test_a_new_operator_writes_nothing_for_a_gang_that_runs() -> None:
    cluster = given_a_running_gang()
    assert Operator(cluster).work().effects == []


def test_a_new_operator_finds_that_the_addresses_of_a_starting_gang_are_published() -> None:
    cluster = given_a_created_gang()
    for pod in cluster.pods.values():
        kubelet.start(cluster, pod)
    Operator(cluster).work()
    before = copied(cluster.others)
    assert not any("replace" in effect for effect in Operator(cluster).work().effects)
    assert cluster.others == before


def test_an_address_that_changes_before_the_start_is_replaced() -> None:
    cluster = given_a_created_gang()
    for pod in cluster.pods.values():
        kubelet.give_address(cluster, pod)
    one_pass(cluster)
    kubelet.give_address(cluster, cluster.pods[WORKERS[1]])
    new = cluster.pods[WORKERS[1]]["status"]["podIPs"][0]["ip"]
    one_pass(cluster)
    assert cluster.others["EndpointSlice/digits-0"]["endpoints"][1]["addresses"] == [new]
    assert cluster.others["Endpoints/digits"]["subsets"][0]["addresses"][1]["ip"] == new


def test_the_names_of_an_attempt_end_when_the_next_one_begins() -> None:
    cluster = given_a_running_gang()
    is_seen_to_fail(cluster, WORKERS[1])
    one_pass(cluster)
    kubelet.sweep(cluster)
    assert "delete EndpointSlice digits-0" in described(one_pass(cluster))
    assert cluster.names == {}
    until_running(cluster)
    assert sorted(cluster.names) == [f"2-{host}" for host in range(4)]
    listed = cluster.others["Endpoints/digits"]["subsets"][0]["addresses"]
    assert [one["hostname"] for one in listed] == [f"2-{host}" for host in range(4)]


def test_a_running_gang_stays_as_it_is_when_somebody_deletes_its_names() -> None:
    """Its workers have met."""
    cluster = given_a_running_gang()
    del cluster.others["EndpointSlice/digits-0"]
    assert described(one_pass(cluster)) == []


# What others have written.


def foreign(kind: str, name: str) -> Object:
    return {"kind": kind, "metadata": {"name": name, "namespace": "default", "uid": "theirs"}}


@pytest.mark.parametrize(("kind", "name"), [("EndpointSlice", "digits-0"), ("Endpoints", "digits")])
def test_an_object_of_somebody_else_blocks_the_gang_and_stays(kind: str, name: str) -> None:
    cluster = given_a_created_gang()
    theirs = cluster.others[f"{kind}/{name}"] = foreign(kind, name)
    get_ready(cluster)
    assert (cluster.status.state, reason(cluster.status)) == (State.BLOCKED, ("False", "NameConflict"))
    assert ready_message(cluster).startswith(f"{kind} {name} already exists ")
    del cluster.others[f"{kind}/{name}"]
    one_pass(cluster)
    assert cluster.status.state == State.RUNNING
    assert theirs not in cluster.others.values()


def test_names_that_an_operator_publishes_too_late_do_not_outlive_the_next_attempt() -> None:
    cluster = given_a_running_gang()
    late = copied(cluster.others["EndpointSlice/digits-0"])
    is_seen_to_fail(cluster, "digits-1-0-1")
    until_running(cluster)
    cluster.others["EndpointSlice/digits-0"] = late
    is_seen_to_fail(cluster, "digits-2-0-1")
    until_running(cluster)
    assert sorted(cluster.names) == [f"3-{host}" for host in range(4)]


def test_a_service_with_a_selector_of_an_earlier_version_keeps_its_endpoints() -> None:
    cluster = given_a_created_gang()
    cluster.others[f"Service/{service_name('digits')}"]["spec"]["selector"] = {"tpu-operator.dev/job-name": "digits"}
    theirs = cluster.others["Endpoints/digits"] = foreign("Endpoints", "digits")
    get_ready(cluster)
    assert (cluster.status.state, cluster.others["Endpoints/digits"]) == (State.RUNNING, theirs)
    assert len(cluster.names) == 4


REFUSALS: dict[str, tuple[ApiError, str]] = {
    "no right": (Forbidden(403, "Forbidden", "no right"), "NotPermitted"),
    "a quota": (Forbidden(403, "Forbidden", "exceeded quota: endpointslices"), "NotPermitted"),
    "a webhook": (InvalidRequest(422, "Invalid", "denied by a webhook"), "InvalidObject"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("kind", ["EndpointSlice", "Endpoints"])
def test_a_refusal_is_named_until_it_is_over(monkeypatch: pytest.MonkeyPatch, refusal: str, kind: str) -> None:
    cluster = given_a_created_gang()
    all_are_ready(cluster)
    error, expected = REFUSALS[refusal]
    create = cluster.create

    def refusing(body: Object) -> Object:
        if body["kind"] == kind:
            raise error
        return create(body)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "create", refusing)
        some_passes(cluster, 3, seconds=30)
        assert (cluster.status.state, reason(cluster.status)) == (State.BLOCKED, ("False", expected))
        assert str(error) in ready_message(cluster)
        assert f"{kind} digits" in ready_message(cluster)
    one_pass(cluster)
    assert cluster.status.state == State.RUNNING
    assert len(cluster.names) == 4


def test_a_job_that_is_only_looked_at_shows_what_would_be_published() -> None:
    cluster = given_a_created_gang()
    all_are_ready(cluster)
    assert [type(action) for action in actions(look(cluster))] == [Publish]


def test_a_one_host_gang_starts_without_names() -> None:
    cluster = given_a_job({"spec.slice.acceleratorType": "v5litepod-4"})
    until_running(cluster)
    assert sorted(cluster.others) == ["ConfigMap/digits-1", "ConfigMap/digits-1-env", "Service/digits"]
