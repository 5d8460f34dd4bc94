"""How long it takes to schedule a slice: affinity compared with leader first (docs/adr/0006-slice-placement.md).

    python -m bench.placement [--hosts 256] [--runs 3]

Uses the real API server and scheduler, simulated nodes, and two free pools of the slice's shape. One run measures both
methods in turn and prints the seconds from the first creation to the last binding, and their ratio, as JSON.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import NODE_POOL, NODES, SimulatedSlice, add_tpu_nodes, start_kwok
from tests.cluster.processes import wait_until
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.naming import workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.worker_pod import worker_pod

Object = dict[str, Any]

CONNECTIONS = 16
PODS = "/api/v1/namespaces/default/pods"
SIDES = {16: "8x8", 64: "16x16", 256: "8x8x16"}
GENERATIONS = {16: ("v5e", "tpu-v5-lite-podslice"), 64: ("v5e", "tpu-v5-lite-podslice"), 256: ("v4", "tpu-v4-podslice")}


def gang(hosts: int) -> list[Object]:
    """Returns the pods of one slice, as the operator creates them."""
    generation, _ = GENERATIONS[hosts]
    recipe = {"globalBatchSize": hosts * 4, "trainSteps": 1, "optimizer": {"name": "sgd", "learningRate": 0.1}}
    job = parse_job(
        {
            "apiVersion": "tpu-operator.dev/v1alpha1",
            "kind": "TPUTrainingJob",
            "metadata": {"name": "bench", "namespace": "default", "uid": "0"},
            "spec": {
                "slice": {"generation": generation, "topology": SIDES[hosts]},
                "trainer": {"image": "i", "command": ["true"]},
                "recipe": recipe,
            },
        }
    )
    resolution = resolve(job.spec)
    pods = [worker_pod(job, resolution, worker) for worker in workers(resolution.layout, 1)]
    for pod in pods:
        # Their job does not exist, so the garbage collector would delete pods with an owner.
        del pod["metadata"]["ownerReferences"]
        pod["spec"]["containers"][0]["env"] = []
    return pods


def create(cluster: ControlPlane, pods: list[Object]) -> None:
    with ThreadPoolExecutor(CONNECTIONS) as connections:
        list(connections.map(lambda pod: cluster.api.call("POST", PODS, pod), pods))


def by_affinity(cluster: ControlPlane, pods: list[Object]) -> None:
    create(cluster, pods)


def leader_first(cluster: ControlPlane, pods: list[Object]) -> None:
    """Keeps the leader's anti-affinity to other slices; the others follow it by their pool's label."""
    leader, *others = copy.deepcopy(pods)
    leader["spec"]["affinity"].pop("podAffinity")
    create(cluster, [leader])
    path = f"{PODS}/{leader['metadata']['name']}"
    wait_until(lambda: "nodeName" in cluster.api.call("GET", path)["spec"], timeout=60, what="the leader is bound")
    node = cluster.api.call("GET", f"{NODES}/{cluster.api.call('GET', path)['spec']['nodeName']}")
    for pod in others:
        pod["spec"].pop("affinity")
        pod["spec"]["nodeSelector"][NODE_POOL] = node["metadata"]["labels"][NODE_POOL]
    create(cluster, others)


def seconds(cluster: ControlPlane, way: Callable[[ControlPlane, list[Object]], None], hosts: int) -> float:
    pods = gang(hosts)
    started = time.monotonic()
    way(cluster, pods)

    def bound() -> bool:
        items = cluster.api.call("GET", PODS)["items"]
        return sum("nodeName" in pod["spec"] for pod in items) == hosts

    wait_until(bound, timeout=300, what=f"all {hosts} workers are bound")
    took = time.monotonic() - started
    cluster.api.call("DELETE", PODS)
    wait_until(lambda: not cluster.api.call("GET", PODS)["items"], timeout=300, what="the workers are gone")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, choices=sorted(SIDES), default=256)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    _, accelerator = GENERATIONS[options.hosts]
    ways = {"affinity": by_affinity, "leaderFirst": leader_first}
    took: dict[str, list[float]] = {name: [] for name in ways}
    with ControlPlane() as cluster:
        start_kwok(cluster)
        for _ in range(2):
            add_tpu_nodes(cluster, SimulatedSlice(accelerator, SIDES[options.hosts], options.hosts, 4))
        for _ in range(options.runs):
            for name, way in ways.items():
                took[name].append(round(seconds(cluster, way, options.hosts), 2))
    ratio = statistics.median(a / b for a, b in zip(took["affinity"], took["leaderFirst"], strict=True))
    print(json.dumps({"hosts": options.hosts, "seconds": took, "medianRatio": round(ratio, 2)}, indent=1))


if __name__ == "__main__":
    main()
