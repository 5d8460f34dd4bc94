"""The arithmetic behind docs/scale.md: who asked for what, which request ends a time, and how rounds become tables."""

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest

from bench.scale import tables
from bench.scale.audit import AuditLog, Cost, Request, counts
from bench.scale.bodies import TOPOLOGIES, indexed_job, training_job, worker_pods
from bench.scale.chart import drawing
from bench.scale.contenders import percentile, quantile, span
from bench.scale.lasting import slope
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.recipe.resolve import resolve

OPERATOR = "system:serviceaccount:tpu-system:tpu"


def entry(verb: str, resource: str, user: str = OPERATOR, **more: Any) -> dict[str, Any]:
    thing, _, subresource = resource.partition("/")
    reference = {"resource": thing, "namespace": "n", "name": "x"} | (
        {"subresource": subresource} if subresource else {}
    )
    return {
        "stage": "ResponseStarted" if verb == "watch" else "ResponseComplete",
        "requestURI": f"/api/v1/namespaces/n/{thing}?fieldManager=m",
        "verb": verb,
        "user": {"username": user},
        "objectRef": reference,
        "responseStatus": {"code": 201 if verb == "create" else 200},
        "requestReceivedTimestamp": "2026-01-01T00:00:01.000000Z",
        "stageTimestamp": "2026-01-01T00:00:01.250000Z",
    } | more


def logged(path: Path, *entries: dict[str, Any]) -> AuditLog:
    path.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in entries))
    return AuditLog(path, OPERATOR)


def test_everybody_is_named_by_the_last_part_of_the_account(tmp_path: Path) -> None:
    log = logged(
        tmp_path / "log",
        entry("create", "pods"),
        entry("update", "endpointslices", "system:serviceaccount:kube-system:endpointslice-controller"),
        entry("create", "pods/binding", "system:kube-scheduler"),
        entry("patch", "pods/status", "kwok"),
        entry("get", "pods", "admin"),
    )
    assert counts(log.since(0)) == {
        "operator": {"create pods": 1},
        "endpointslice-controller": {"update endpointslices": 1},
        "kube-scheduler": {"create pods/binding": 1},
        "kwok": {"patch pods/status": 1},
    }


def test_a_watch_counts_when_it_begins_and_not_when_it_ends(tmp_path: Path) -> None:
    log = logged(tmp_path / "log", entry("watch", "pods"), entry("watch", "pods", stage="ResponseComplete"))
    assert log.read() == 1
    assert Cost.of(log.requests) == Cost(creates=0, other_writes=0, events=0, reads=0, endpoint_writes=0)


def test_a_line_that_is_not_complete_yet_is_read_later(tmp_path: Path) -> None:
    log = logged(tmp_path / "log", entry("create", "pods"))
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole + whole[:100])
    assert (log.pods_posted(), log.read()) == (1, 1)
    (tmp_path / "log").write_bytes(whole + whole)
    assert (log.pods_posted(), log.read()) == (2, 2)


def test_a_cost_counts_the_operators_requests_and_everybodys_endpoints(tmp_path: Path) -> None:
    log = logged(
        tmp_path / "log",
        entry("create", "pods"),
        entry("create", "pods", responseStatus={"code": 409}),
        entry("create", "services"),
        entry("create", "events"),
        entry("update", "tputrainingjobs/status"),
        entry("deletecollection", "pods"),
        entry("list", "pods"),
        entry("get", "tputrainingjobs"),
        entry("create", "pods", "admin"),
        entry("create", "endpointslices"),
        entry("update", "endpoints", "system:serviceaccount:kube-system:endpoint-controller"),
    )
    assert Cost.of(log.since(0)) == Cost(creates=1, other_writes=5, events=1, reads=2, endpoint_writes=2)


def test_a_time_ends_with_the_last_pod_and_not_with_what_follows(tmp_path: Path) -> None:
    log = logged(
        tmp_path / "log",
        entry("create", "tputrainingjobs", "admin"),
        entry("create", "pods", stageTimestamp="2026-01-01T00:00:04.500000Z"),
        entry("update", "tputrainingjobs/status", stageTimestamp="2026-01-01T00:00:09.000000Z"),
    )
    requests: list[Request] = log.since(0)
    assert span(requests, requests[0]) == 3.5


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(value) for value in range(1, 201)], 0.99) == 198.0


@pytest.mark.parametrize(("counted", "bound"), [([0, 99, 100], 0.1), ([98, 99, 100], 0.1), ([99, 99, 100], 0.05)])
def test_a_quantile_of_a_histogram_is_its_buckets_upper_bound(counted: list[float], bound: float) -> None:
    assert quantile(dict(zip(("0.05", "0.1", "+Inf"), counted, strict=True)), 0.99) == bound


def test_a_quantile_above_all_bounds_has_none() -> None:
    assert quantile({"0.05": 1.0, "+Inf": 100.0}, 0.99) is None


def test_a_slope_is_per_step() -> None:
    assert slope([100.0, 102.0, 104.0]) == pytest.approx(2.0)
    assert slope([100.0]) == 0.0


@pytest.mark.parametrize("hosts", TOPOLOGIES)
def test_every_size_is_a_slice_of_the_catalogue(hosts: int) -> None:
    body = training_job("job", hosts, "n")
    body["metadata"]["uid"] = "u"
    assert resolve(parse_job(body).spec).layout.hosts == hosts


def test_the_floors_pods_are_the_operators_without_its_labels() -> None:
    owner = {"metadata": {"name": "owner", "uid": "u"}}
    pods = worker_pods("job", 4, "floor", owner, attempt=2)
    assert [pod["metadata"]["name"] for pod in pods] == [f"job-2-0-{host}" for host in range(4)]
    assert not [label for label in pods[0]["metadata"]["labels"] if label.startswith("tpu-operator.dev")]
    [reference] = pods[0]["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"], reference["uid"]) == ("ConfigMap", "owner", "u")
    job = indexed_job("job", pods)
    assert (job["spec"]["completions"], job["spec"]["template"]["spec"]["containers"]) == (
        4,
        pods[0]["spec"]["containers"],
    )


def run(create: float, restart: float | None = None) -> dict[str, Any]:
    cost = {"creates": 4, "other_writes": 8, "events": 4, "reads": 7, "endpoint_writes": 3}
    account = {"cost": cost, "cpuMsPerHost": 2.0}
    more = {"create": account, "firstPod": 0.5, "hintToPass": 0.1} | ({"restart": account} if restart else {})
    return {"create": create, "restart": restart, "more": more}


def a_round(operator: float, floor: float, hosts: int = 4) -> dict[str, Any]:
    first, second = run(operator, 2 * operator), run(floor, 2 * floor)
    return {"jobs": 1, "hosts": hosts, "operator": first, "floor": second, "indexed-job": run(2 * floor)}


ROUNDS = [a_round(3.0, 1.0), a_round(8.0, 4.0), a_round(5.0, 2.0)]


def test_times_are_compared_within_a_round() -> None:
    head, _, create, restart = tables.times_table(ROUNDS).splitlines()
    assert head.startswith("| what | rounds |")
    ours, theirs = "5.00 (3.00..8.00) | 2.50x (2.00..3.00)", "4.00 (2.00..8.00) | 2.00x (2.00..2.00)"
    assert create == f"| create 4 hosts | 3 | 2.00 (1.00..4.00) | {ours} | {theirs} |"
    assert restart.startswith("| restart 4 hosts | 3 | 4.00 (2.00..8.00) | 10.00 (6.00..16.00) |")
    assert restart.endswith("|  |  |")


def test_requests_of_many_jobs_are_given_for_one() -> None:
    crowd = a_round(3.0, 1.0) | {"jobs": 4}
    line = tables.requests_table([crowd]).splitlines()[2]
    assert line == "| one of 4 jobs x 4 hosts | 1 | 2 | 1 | 1.75 | 0.75 | 2.0 (2.0..2.0) |"


def test_the_drawing_has_a_curve_for_every_contender_and_each_panel() -> None:
    picture = fromstring(drawing([*ROUNDS, a_round(9.0, 5.0, hosts=2304)]))
    lines = [each for each in picture.iter() if each.get("class", "").startswith("line") and "L" in each.get("d", "")]
    assert [line.get("class") for line in lines] == [
        *("line floor", "line indexed-job", "line operator"),
        *("line floor", "line operator"),
    ]
