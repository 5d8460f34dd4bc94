"""Where the real scheduler puts slices: one slice in one node pool, and no two gangs block each other forever."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import NODES, TPU_TAINT, NodePool, SimulatedSlice, add_tpu_nodes, remove_nodes
from tests.controlplane.jobs import Namespace, Object, condition, digits
from tests.controlplane.operator_process import OperatorProcess

TWO_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "2x4", 2, 4)
FOUR_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "4x4", 4, 4)


class Pools:
    """Node pools of one test, deleted after it."""

    def __init__(self, cluster: ControlPlane) -> None:
        self._cluster = cluster
        self._made: list[NodePool] = []

    def add(self, shape: SimulatedSlice) -> NodePool:
        pool = add_tpu_nodes(self._cluster, shape)
        self._made.append(pool)
        return pool

    def taint(self, pool: NodePool, *taints: Object) -> None:
        """The pool's taints besides GKE's own for TPUs."""
        for node in pool.nodes:
            patch = {"spec": {"taints": [TPU_TAINT, *taints]}}
            self._cluster.api.call("PATCH", f"{NODES}/{node}", patch, content_type="application/merge-patch+json")

    def remove(self) -> None:
        for pool in self._made:
            remove_nodes(self._cluster, pool)


@pytest.fixture
def pools(control_plane: ControlPlane) -> Iterator[Pools]:
    made = Pools(control_plane)
    yield made
    made.remove()


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, namespace: str) -> Namespace:
    return Namespace(control_plane, namespace)


@pytest.fixture
def operator(control_plane: ControlPlane, space: Namespace) -> Iterator[OperatorProcess]:
    process = OperatorProcess(control_plane, space.name)
    process.start()
    yield process
    process.stop()


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


def test_jobs_that_start_together_fill_one_pool_each(space: Namespace, operator: OperatorProcess, pools: Pools) -> None:
    free = [set(pools.add(FOUR_HOSTS).nodes) for _ in range(3)]
    jobs = ["one", "two", "three"]
    for name in jobs:
        space.apply(tpu_job(name, "v5litepod-16"))
    for name in jobs:
        space.wait_for_state("Running", name=name)

    taken = [nodes for name in jobs for nodes in nodes_by_slice(space, name)]

    assert sorted(map(sorted, taken)) == sorted(map(sorted, free))


def test_every_slice_of_a_multislice_job_fills_a_pool(
    space: Namespace, operator: OperatorProcess, pools: Pools
) -> None:
    free = [set(pools.add(FOUR_HOSTS).nodes) for _ in range(2)]
    space.apply(tpu_job("several", "v5litepod-16", 2))
    space.wait_for_state("Running", name="several")

    assert sorted(map(sorted, nodes_by_slice(space, "several"))) == sorted(map(sorted, free))


def test_two_jobs_that_need_four_pools_of_three_run_in_turn(
    space: Namespace, operator: OperatorProcess, pools: Pools
) -> None:
    for _ in range(3):
        pools.add(TWO_HOSTS)
    space.apply(impatient("one"))
    space.apply(impatient("two"))

    finish_in_turn(space, "one", "two")


def test_two_jobs_that_hold_what_the_other_needs_run_in_turn(
    space: Namespace, operator: OperatorProcess, pools: Pools
) -> None:
    kept = {"key": "kept-for", "value": "two", "effect": "NoSchedule"}
    for_one, for_two = pools.add(TWO_HOSTS), pools.add(TWO_HOSTS)
    pools.taint(for_two, kept)
    space.apply(impatient("one"))
    space.wait(lambda: set(for_one.nodes) in nodes_by_slice(space, "one"), "job one holds its pool")
    space.apply(impatient("two", trainer={"tolerations": [{"key": "kept-for", "operator": "Exists"}]}))
    space.wait(lambda: set(for_two.nodes) in nodes_by_slice(space, "two"), "job two holds the other")
    pools.taint(for_two)

    finish_in_turn(space, "one", "two")

    attempts = [space.status(name)["attempt"] for name in ("one", "two")]
    assert max(attempts) > 1
    assert ["byClass" in space.status(name).get("restarts", {}) for name in ("one", "two")] == [False, False]


def test_a_gang_that_releases_its_nodes_says_why(space: Namespace, operator: OperatorProcess, pools: Pools) -> None:
    pools.add(TWO_HOSTS)
    space.apply(impatient("alone"))

    space.wait(
        lambda: condition(space.status("alone"), "GangReady").get("reason") == "PartlyPlaced", "the gang is released"
    )

    message = condition(space.status("alone"), "Ready")["message"]
    assert "2 of 4 workers could not be placed within 3 s" in message
