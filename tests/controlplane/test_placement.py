"""Where the real scheduler puts slices: one slice in one node pool, and no two gangs block each other forever.

The stories are told at the same time, each with jobs and node pools of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import NODES, TPU_TAINT, NodePool, SimulatedSlice, add_tpu_nodes, remove_nodes
from tests.cluster.namespaces import fresh_namespace
from tests.conftest import MEASURED
from tests.controlplane.jobs import Namespace, Object, condition, digits
from tests.controlplane.operator_process import serving_everywhere
from tests.stories import Group, Stories, selected, told_together

TWO_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "2x4", 2, 4)
FOUR_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "4x4", 4, 4)
V5P = SimulatedSlice("tpu-v5p-slice", "2x2x4", 4, 4)
V6E = SimulatedSlice("tpu-v6e-slice", "4x4", 4, 4)


@dataclass
class Place:
    """A namespace of one story, and its node pools, where its jobs alone can run."""

    space: Namespace
    pools: list[NodePool] = field(default_factory=list)

    @property
    def _cluster(self) -> ControlPlane:
        return self.space.cluster

    @property
    def own(self) -> dict[str, str]:
        """The label of its nodes."""
        return {"story": self.space.name}

    def apply(self, job: Object) -> None:
        trainer = job["spec"]["trainer"] | {"nodeSelector": self.own}
        self.space.apply(job | {"spec": job["spec"] | {"trainer": trainer}})

    def add(self, shape: SimulatedSlice) -> NodePool:
        self.pools.append(add_tpu_nodes(self._cluster, shape, self.own))
        return self.pools[-1]

    def taint(self, pool: NodePool, *taints: Object) -> None:
        """The pool's taints besides GKE's own for TPUs."""
        for node in pool.nodes:
            patch = {"spec": {"taints": [TPU_TAINT, *taints]}}
            self._cluster.api.call("PATCH", f"{NODES}/{node}", patch, content_type="application/merge-patch+json")

    def lose(self, pool: NodePool) -> None:
        """With its pods, which the pod garbage collector would delete after 40 s."""
        remove_nodes(self._cluster, pool)
        for pod in self._cluster.api.call("GET", "/api/v1/pods")["items"]:
            if pod["spec"].get("nodeName") in pool.nodes:
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                self._cluster.api.call("DELETE", f"{path}?gracePeriodSeconds=0")


@contextmanager
def a_place(cluster: ControlPlane) -> Iterator[Place]:
    with fresh_namespace(cluster.api) as name:
        place = Place(Namespace(cluster, name))
        yield place
        for pool in place.pools:
            remove_nodes(cluster, pool)


def tpu_job(name: str, accelerator_type: str, count: int = 1, **spec: Object) -> Object:
    wanted = {"acceleratorType": accelerator_type, "count": count, "hardware": "TPU"}
    # Several slices need it on TPUs.
    trainer = {"backend": "XLASPMD"} | spec.pop("trainer", {})
    return digits(slice=wanted, trainer=trainer, **spec) | {"metadata": {"name": name}}


def impatient(name: str, **spec: Object) -> Object:
    """A job of two slices of two hosts, with little time to find their nodes."""
    policy = {"startDeadlineSeconds": 3, "restart": {"backoff": {"initialSeconds": 1, "maxSeconds": 10}}}
    return tpu_job(name, "v5litepod-8", 2, runPolicy=policy, **spec)


def nodes_by_slice(space: Namespace, name: str) -> list[set[str]]:
    """The nodes that every slice of the job has found; slice 0 first."""
    nodes: dict[str, set[str]] = defaultdict(set)
    for pod in space.pods(name):
        found = nodes[pod["metadata"]["labels"]["tpu-operator.dev/slice-index"]]
        if "nodeName" in pod["spec"]:
            found.add(pod["spec"]["nodeName"])
    return [nodes[index] for index in sorted(nodes)]


def finish(space: Namespace, name: str) -> None:
    for pod in space.pods(name):
        space.finish(pod["metadata"]["name"])
    space.wait_for_state("Succeeded", name=name)


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
        lambda: condition(space.status("alone"), "GangReady").get("reason") == "PartlyPlaced", "the gang is released"
    )

    message = condition(space.status("alone"), "Ready")["message"]
    assert "2 of 4 workers could not be placed within 3 s" in message


def a_full_v5p_pool_is_not_waited_for_taken_when_it_is_free_and_left_when_it_is_lost(place: Place) -> str:
    """Returns how long it took."""
    space = place.space
    wanted, _ = place.add(V5P), place.add(V6E)
    place.apply(tpu_job("earlier", "v5p-32"))
    space.wait_for_state("Running", name="earlier")
    v6e = {"slice": {"acceleratorType": "v6e-16"}, "after": "5s"}
    policy = {"restart": {"backoff": {"initialSeconds": 1, "maxSeconds": 1}}}
    placement = {"alternatives": [v6e], "grow": "AtCheckpoint", "minRunSeconds": 1}
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
    assert space.status("moving")["restarts"]["byClass"] == {"Infrastructure": 1}
    waits = (
        f"ran on v6e {between(created, ran[0]):.0f} s after its creation",
        f"left it {between(free, moves[1]['at']):.0f} s after the v5p pool was free",
        f"ran on v5p {between(moves[1]['at'], ran[1]):.0f} s later",
    )
    story = space.kubectl("describe", "tpujob", "moving")
    for words in (
        "moves from v5p-32 to v6e-16: no nodes for v5p-32 within 5 s",
        "moves from v6e-16 to v5p-32: 4 placeholders hold the nodes of v5p-32",
        "moves from v5p-32 to v6e-16: v5p-32 did not come back within 5 s",
    ):
        assert words in story
    space.wait(lambda: not any("hold" in name for name in space.names("pod")), "no placeholder is left")
    return f"a job for a full v5p pool (after: 5s) {', '.join(waits)}"


def a_slice_without_a_node_pool_is_left_at_once(place: Place) -> None:
    """By the words of the real scheduler; the test plays the cluster autoscaler."""
    space = place.space
    place.add(TWO_HOSTS)
    other = {"slice": {"acceleratorType": "v5litepod-8"}, "after": "10h"}
    # Or the scheduler would name the taints of another story's nodes, which says nothing about their labels.
    tolerant = {"tolerations": [{"operator": "Exists"}]}
    place.apply(tpu_job("nowhere", "v4-16", placement={"alternatives": [other]}, trainer=tolerant))
    space.wait(lambda: len(space.pods("nowhere")) == 2, "the workers wait for nodes")
    for pod in space.pods("nowhere"):
        regarding = {"kind": "Pod"} | {name: pod["metadata"][name] for name in ("namespace", "name", "uid")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "scale-up-"},
            "involvedObject": regarding,
            "reason": "NotTriggerScaleUp",
            "message": "pod didn't trigger scale-up: 2 node(s) didn't match Pod's node affinity/selector",
            "type": "Normal",
        }
        space.cluster.api.call("POST", f"/api/v1/namespaces/{space.name}/events", event)

    space.wait_for_state("Running", name="nowhere")
    (move,) = space.status("nowhere")["placement"]["moves"]
    assert (move["fromSlice"], move["toSlice"], move["reason"]) == ("v4-16", "v5litepod-8", "Refused")
    assert "the cluster has no node pool for v4-16: 0/" in move["why"]


def wait_until_it_runs_on(space: Namespace, alternative: int) -> str:
    """Returns when all workers were ready, as the status says."""

    def runs() -> bool:
        status = space.status("moving")
        where = status.get("placement", {}).get("alternative", 0)
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
        two_jobs_that_need_four_pools_of_three_run_in_turn,
        two_jobs_that_hold_what_the_other_needs_run_in_turn,
        a_gang_that_releases_its_nodes_says_why,
        a_full_v5p_pool_is_not_waited_for_taken_when_it_is_free_and_left_when_it_is_lost,
        a_slice_without_a_node_pool_is_left_at_once,
    )
}


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, job_definition: None) -> Iterator[None]:
    with serving_everywhere(control_plane, "--fixed-node-pools"):
        yield


@pytest.fixture(scope="module")
def stories(control_plane: ControlPlane, operator: None, request: pytest.FixtureRequest) -> Iterator[Stories]:
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
