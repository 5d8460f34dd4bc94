"""Where the real scheduler puts slices: one slice in one node pool, and no two gangs block each other forever.

The stories are told at the same time, each with jobs and node pools of its own.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import patience
from tests.conftest import MEASURED
from tests.controlplane.jobs import Namespace, Object, condition, digits
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.places import (
    FOUR_HOSTS,
    HALF_V7,
    TWO_HOSTS,
    V4,
    V5P,
    V6E,
    Place,
    a_place,
    finish,
    nodes_by_slice,
    tpu_job,
)
from tests.stories import Group, Stories, selected, told_together


def impatient(name: str, **spec: Object) -> Object:
    """A job of two slices of two hosts, with little time to find their nodes."""
    policy = {"startDeadlineSeconds": patience(3), "restart": {"backoff": {"initialSeconds": 1, "maxSeconds": 10}}}
    return tpu_job(name, "v5litepod-8", 2, runPolicy=policy, **spec)


def finish_in_turn(space: Namespace, first: str, second: str) -> None:
    """Both jobs run and finish, in either order."""

    def running() -> list[str]:
        return [name for name in (first, second) if space.status(name).get("state") == "Running"]

    space.wait(lambda: len(running()) == 1, "one of the two jobs runs", timeout=180)
    [winner] = running()
    finish(space, winner)
    loser = second if winner == first else first
    space.wait(lambda: running() == [loser], f"{loser} runs, too", timeout=180)
    finish(space, loser)


def jobs_that_start_together_fill_one_pool_each(place: Place) -> None:
    space = place.space
    free = [set(place.add(FOUR_HOSTS).nodes) for _ in range(3)]
    jobs = ["one", "two", "three"]
    for name in jobs:
        place.apply(tpu_job(name, "v5litepod-16"))
    for name in jobs:
        space.wait_for_state("Running", name=name)

    taken = [nodes for name in jobs for nodes in nodes_by_slice(space, name)]

    assert sorted(map(sorted, taken)) == sorted(map(sorted, free))


def every_slice_of_a_multislice_job_fills_a_pool(place: Place) -> None:
    space = place.space
    free = [set(place.add(FOUR_HOSTS).nodes) for _ in range(2)]
    place.apply(tpu_job("several", "v5litepod-16", 2))
    space.wait_for_state("Running", name="several")

    assert sorted(map(sorted, nodes_by_slice(space, "several"))) == sorted(map(sorted, free))


def parts_of_a_larger_pool_hold_one_slice_each(place: Place) -> None:
    space, pool = place.space, place.add(FOUR_HOSTS)
    # Not in the order of the nodes, as GKE does not promise it.
    halves = [set(pool.nodes[::2]), set(pool.nodes[1::2])]
    for number, half in enumerate(halves):
        place.label(sorted(half), {"cloud.google.com/gke-tpu-slice-2x4-id": f"{space.name}-{number}"})
    for name in ("one", "two"):
        place.apply(tpu_job(name, "v5litepod-8", formation="SubSlice"))
    for name in ("one", "two"):
        space.wait_for_state("Running", name=name)

    taken = [nodes for name in ("one", "two") for nodes in nodes_by_slice(space, name)]

    assert sorted(map(sorted, taken)) == sorted(map(sorted, halves))


def a_slice_that_gke_forms_may_span_pools(place: Place) -> None:
    """A pool of the same shape that belongs to no slice is left alone: its chips have no links."""
    space = place.space
    first, _, last = (place.add(HALF_V7) for _ in range(3))
    joined = [*first.nodes, *last.nodes]
    place.label(joined, {"cloud.google.com/gke-tpu-slice": space.name})
    place.apply(tpu_job("formed", "tpu7x-32", formation="DynamicSlice"))
    space.wait_for_state("Running", name="formed")

    assert nodes_by_slice(space, "formed") == [set(joined)]


def two_jobs_that_need_four_pools_of_three_run_in_turn(place: Place) -> None:
    space = place.space
    for _ in range(3):
        place.add(TWO_HOSTS)
    place.apply(impatient("one"))
    place.apply(impatient("two"))

    finish_in_turn(space, "one", "two")


def two_jobs_that_hold_what_the_other_needs_run_in_turn(place: Place) -> None:
    space = place.space
    kept = {"key": "kept-for", "value": "two", "effect": "NoSchedule"}
    for_one, for_two = place.add(TWO_HOSTS), place.add(TWO_HOSTS)
    place.taint(for_two, kept)
    place.apply(impatient("one"))
    space.wait(lambda: set(for_one.nodes) in nodes_by_slice(space, "one"), "job one holds its pool")
    place.apply(impatient("two", trainer={"tolerations": [{"key": "kept-for", "operator": "Exists"}]}))
    space.wait(lambda: set(for_two.nodes) in nodes_by_slice(space, "two"), "job two holds the other")
    place.taint(for_two)

    finish_in_turn(space, "one", "two")

    attempts = [space.status(name)["attempt"] for name in ("one", "two")]
    assert max(attempts) > 1
    assert ["byClass" in space.status(name).get("restarts", {}) for name in ("one", "two")] == [False, False]


def a_gang_that_releases_its_nodes_says_why(place: Place) -> None:
    space = place.space
    place.add(TWO_HOSTS)
    place.apply(impatient("alone"))

    space.wait(
        lambda: condition(space.status("alone"), "GangReady").get("reason") == "SomePodsUnschedulable",
        "the gang is released",
    )

    message = condition(space.status("alone"), "Ready")["message"]
    assert "2 of 4 workers " in message
    assert f"within {space.job('alone')['spec']['runPolicy']['startDeadlineSeconds']} s" in message


def a_full_v5p_pool_is_not_waited_for_taken_when_it_is_free_and_left_when_it_is_lost(place: Place) -> str:
    """Returns how long it took."""
    space = place.space
    wanted, _ = place.add(V5P), place.add(V6E)
    place.apply(tpu_job("earlier", "v5p-32"))
    space.wait_for_state("Running", name="earlier")
    wait = patience(5)
    v6e = {"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": wait}
    policy = {"restart": {"backoff": {"initialSeconds": 1, "maxSeconds": 1}}}
    placement = {"alternatives": [v6e], "returnToPreferred": "AtCheckpoint", "minRunSeconds": 1}
    saved = {"uri": "gs://bucket/jobs"}
    place.apply(tpu_job("moving", "v5p-32", runPolicy=policy, placement=placement, checkpoint=saved))

    ran = [wait_until_it_runs_on(space, 1)]
    finish(space, "earlier")
    ran.append(wait_until_it_runs_on(space, 0))
    assert nodes_by_slice(space, "moving")[0] >= set(wanted.nodes)
    place.lose(wanted)
    ran.append(wait_until_it_runs_on(space, 1))

    moves, free = space.status("moving")["placement"]["moves"], space.status("earlier")["completionTime"]
    created = space.job("moving")["metadata"]["creationTimestamp"]
    assert [move["reason"] for move in moves] == ["NoCapacity", "Better", "Lost"]
    assert space.status("moving")["restarts"]["byClass"] == [{"class": "Infrastructure", "count": 1}]
    waits = (
        f"ran on v6e {between(created, ran[0]):.0f} s after its creation",
        f"left it {between(free, moves[1]['at']):.0f} s after the v5p pool was free",
        f"ran on v5p {between(moves[1]['at'], ran[1]):.0f} s later",
    )
    story = space.kubectl("describe", "tpujob", "moving")
    for words in (
        f"moves from v5p-32 to v6e-16: no nodes for v5p-32 within {wait} s",
        "moves from v6e-16 to v5p-32: 4 placeholders hold the nodes of v5p-32",
        f"moves from v5p-32 to v6e-16: v5p-32 did not come back within {wait} s",
    ):
        assert words in story
    space.wait(lambda: not any("hold" in name for name in space.names("pods")), "no placeholder is left")
    return f"a job for a full v5p pool (waits {wait} s) {', '.join(waits)}"


def gangs_of_higher_priority_preempt_one_gang_each(place: Place) -> None:
    """On four full pools, of two kinds."""
    space, kinds = place.space, {"v5litepod-16": FOUR_HOSTS, "v4-16": V4}
    pools = {kind: [set(place.add(shape).nodes) for _ in range(2)] for kind, shape in kinds.items()}
    low = place.priority(-5)
    fill = {kind: [f"low-{kind}-{number}" for number in range(2)] for kind in kinds}
    for kind, names in fill.items():
        for name in names:
            place.apply(tpu_job(name, kind, trainer=low))
    for name in [name for names in fill.values() for name in names]:
        space.wait_for_state("Running", name=name)

    for kind in kinds:
        place.apply(tpu_job(f"high-{kind}", kind, trainer=place.priority(5)))
    for kind in kinds:
        space.wait_for_state("Running", name=f"high-{kind}")
        assert nodes_by_slice(space, f"high-{kind}")[0] in pools[kind]
        finish(space, f"high-{kind}")
    for names in fill.values():
        for name in names:
            space.wait_for_state("Running", name=name)
        assert sorted(preemptions(space, name) for name in names) == [0, 1]


def a_job_of_several_slices_preempts_a_gang_for_each(place: Place) -> None:
    space = place.space
    pools = [set(place.add(TWO_HOSTS).nodes) for _ in range(3)]
    place.apply(tpu_job("pair", "v5litepod-8", 2, trainer=place.priority(-5)))
    place.apply(tpu_job("single", "v5litepod-8", trainer=place.priority(1)))
    for name in ("pair", "single"):
        space.wait_for_state("Running", name=name)

    place.apply(tpu_job("high", "v5litepod-8", 2, trainer=place.priority(5)))
    space.wait_for_state("Running", name="high")

    taken = nodes_by_slice(space, "high")
    assert all(nodes in pools for nodes in taken)
    assert taken[0] != taken[1]


def a_gang_of_the_same_priority_waits(place: Place) -> None:
    space = place.space
    place.add(FOUR_HOSTS)
    place.apply(tpu_job("first", "v5litepod-16", trainer=place.priority(5)))
    space.wait_for_state("Running", name="first")
    place.apply(tpu_job("second", "v5litepod-16", trainer=place.priority(5)))
    space.wait(lambda: len(refused(space, "second")) == 4, "the scheduler has looked at all its workers")

    assert nodes_by_slice(space, "second") == [set()]
    assert preemptions(space, "first") == 0


def a_gang_and_one_of_an_earlier_version_keep_each_other_off(place: Place) -> None:
    """Until that version, every worker had the label and both terms of its slice."""
    space = place.space
    place.add(FOUR_HOSTS)
    place.apply(tpu_job("new", "v5litepod-16", trainer=place.priority(5)))
    space.wait_for_state("Running", name="new")
    earlier = [as_before(pod, "earlier") for pod in space.pods("new")]
    for pod in earlier:
        space.cluster.api.call("POST", f"/api/v1/namespaces/{space.name}/pods", pod)
    space.wait(lambda: len(refused(space, "earlier")) == 4, "the scheduler has looked at the earlier version's")
    finish(space, "new")
    space.wait(lambda: len(set.union(*nodes_by_slice(space, "earlier"))) == 4, "they have the pool")

    place.apply(tpu_job("next", "v5litepod-16", trainer=place.priority(0)))
    space.wait(lambda: len(refused(space, "next")) == 4, "the scheduler has looked at the new gang's")

    assert nodes_by_slice(space, "next") == [set()]


def a_first_worker_that_is_created_again_joins_its_peers(place: Place) -> None:
    space = place.space
    pool = place.add(FOUR_HOSTS)
    place.cordon(pool, 0)
    place.apply(tpu_job("gang", "v5litepod-16"))
    space.wait(lambda: set(pool.nodes[1:]) in nodes_by_slice(space, "gang"), "the gang has all nodes but one")
    place.add(FOUR_HOSTS)
    before = space.pods("gang")[0]["metadata"]
    # Without a trace: one that is seen to stop may be a failure, and kwok deletes it by its name, perhaps so late that
    # it deletes the next one.
    space.cluster.erase("pods", space.name, "gang-1-0-0")
    place.cordon(pool, 0, cordoned=False)

    space.wait_for_state("Running", name="gang", attempt=1)
    assert nodes_by_slice(space, "gang") == [set(pool.nodes)]
    assert space.pods("gang")[0]["metadata"]["uid"] != before["uid"]


def placeholders_of_a_negative_priority_yield_to_another_gang(place: Place) -> None:
    space = place.space
    wanted, _ = place.add(V5P), place.add(V6E)
    place.apply(tpu_job("earlier", "v5p-32"))
    space.wait_for_state("Running", name="earlier")
    placement = {
        "alternatives": [{"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": patience(5)}],
        "returnToPreferred": "AtCheckpoint",
        "minRunSeconds": 1,
        "placeholderPriorityClass": place.priority(-5)["priorityClassName"],
    }
    place.apply(tpu_job("moving", "v5p-32", placement=placement, checkpoint={"uri": "gs://bucket/jobs"}))
    wait_until_it_runs_on(space, 1)
    place.cordon(wanted, 0)
    finish(space, "earlier")
    space.wait(lambda: len(held(space)) == 3, "placeholders hold all nodes of the pool but one", timeout=120)

    place.apply(tpu_job("other", "v5p-32"))
    space.wait(lambda: set(wanted.nodes[1:]) in nodes_by_slice(space, "other"), "the other job takes their nodes")
    place.cordon(wanted, 0, cordoned=False)
    space.wait_for_state("Running", name="other")

    assert space.status("moving")["placement"]["optionIndex"] == 1
    assert not held(space)


def a_job_on_cpus_does_not_keep_a_gang_from_its_pool(place: Place) -> None:
    """Although it may choose the nodes of TPUs, as every pod may."""
    space = place.space
    pool = set(place.add(FOUR_HOSTS).nodes)
    guest = digits(
        slice={"acceleratorType": "v5litepod-1", "hardware": "CPU"},
        trainer={"tolerations": [{"key": "google.com/tpu", "operator": "Exists"}]},
    )
    place.apply(guest | {"metadata": {"name": "guest"}})
    space.wait_for_state("Running", name="guest")
    assert nodes_by_slice(space, "guest")[0] < pool

    place.apply(tpu_job("gang", "v5litepod-16"))
    space.wait_for_state("Running", name="gang")


def preemptions(space: Namespace, name: str) -> int:
    """How often the job has restarted, which must be for this reason alone."""
    by_class = space.status(name).get("restarts", {}).get("byClass", [])
    assert {restarts["class"] for restarts in by_class} <= {"Preemption"}
    return sum(restarts["count"] for restarts in by_class)


def refused(space: Namespace, name: str) -> list[str]:
    """What the scheduler says about each worker for which it has found no node."""
    conditions = [condition(pod.get("status", {}), "PodScheduled") for pod in space.pods(name)]
    return [said["message"] for said in conditions if said.get("status") == "False"]


def held(space: Namespace) -> set[str]:
    """The nodes that placeholders have."""
    pods = space.cluster.api.call("GET", f"/api/v1/namespaces/{space.name}/pods")["items"]
    return {pod["spec"]["nodeName"] for pod in pods if "-hold" in pod["metadata"]["name"] and "nodeName" in pod["spec"]}


def as_before(pod: Object, job: str) -> Object:
    """A worker of another job, as the version before created it."""
    own, key = f"{job}-1-0", "tpu-operator.dev/slice-id"
    name = pod["metadata"]["name"].replace(pod["metadata"]["labels"]["tpu-operator.dev/job-name"], job)
    labels = pod["metadata"]["labels"] | {"tpu-operator.dev/job-name": job, key: own}
    pool = {"topologyKey": "cloud.google.com/gke-nodepool", "namespaceSelector": {}}

    def required(*expressions: Object) -> Object:
        term = {"labelSelector": {"matchExpressions": list(expressions)}, **pool}
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}

    same = {"key": key, "operator": "In", "values": [own]}
    other = ({"key": key, "operator": "Exists"}, {**same, "operator": "NotIn"})
    kept = ("containers", "nodeSelector", "tolerations", "restartPolicy")
    spec = {field: pod["spec"][field] for field in kept} | {
        "affinity": {"podAffinity": required(same), "podAntiAffinity": required(*other)},
        "containers": [
            {field: container[field] for field in ("name", "image", "resources")}
            for container in pod["spec"]["containers"]
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def wait_until_it_runs_on(space: Namespace, alternative: int) -> str:
    """Returns when all workers were ready, as the status says."""

    def runs() -> bool:
        status = space.status("moving")
        where = status.get("placement", {}).get("optionIndex", 0)
        return status.get("state") == "Running" and where == alternative

    space.wait(runs, f"the job runs on alternative {alternative}", timeout=180)
    since: str = condition(space.status("moving"), "GangReady")["lastTransitionTime"]
    return since


def between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


STORIES = {
    story.__name__: story
    for story in (
        jobs_that_start_together_fill_one_pool_each,
        every_slice_of_a_multislice_job_fills_a_pool,
        parts_of_a_larger_pool_hold_one_slice_each,
        a_slice_that_gke_forms_may_span_pools,
        two_jobs_that_need_four_pools_of_three_run_in_turn,
        two_jobs_that_hold_what_the_other_needs_run_in_turn,
        a_gang_that_releases_its_nodes_says_why,
        a_full_v5p_pool_is_not_waited_for_taken_when_it_is_free_and_left_when_it_is_lost,
        gangs_of_higher_priority_preempt_one_gang_each,
        a_job_of_several_slices_preempts_a_gang_for_each,
        a_gang_of_the_same_priority_waits,
        a_gang_and_one_of_an_earlier_version_keep_each_other_off,
        a_first_worker_that_is_created_again_joins_its_peers,
        placeholders_of_a_negative_priority_yield_to_another_gang,
        a_job_on_cpus_does_not_keep_a_gang_from_its_pool,
    )
}


@pytest.fixture(scope="module")
def stories(
    control_plane: ControlPlane, served_everywhere: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Stories]:
    def tell(story: Callable[[Place], str | None]) -> str | None:
        with a_place(control_plane) as place:
            return story(place)

    chosen = {name: partial(tell, STORIES[name]) for name in selected(request, STORIES)}
    with told_together(Group(chosen, at_once=len(STORIES))) as told:
        yield told


@pytest.mark.parametrize("story", STORIES)
def test_in_a_real_cluster(story: str, stories: Stories, record_property: Callable[[str, object], None]) -> None:
    if measured := stories.end_of(story):
        record_property(MEASURED, measured)
