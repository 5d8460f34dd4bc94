"""What the operator sets, through TorchTPU's own `set_tpu_launch_env`, for every shape that it runs on.

The hosts of a slice must agree with each other, and each process must listen where the others look for it: TorchTPU
takes a process's address from the list by its rank.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

from tests.contract.device_plugin import device_plugin
from tests.contract.slices import job_on, pod_env
from tests.stacks import second
from tpu_training_operator.api.catalogue import Shape, generations
from tpu_training_operator.api.slice import WITHOUT_TORCH_TPU
from tpu_training_operator.domain.job.naming import WorkerId, workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.shared import config_map

SHAPES = [
    shape
    for generation in generations().values()
    if generation.on_gke and generation.name not in WITHOUT_TORCH_TPU
    for shape in generation.shapes
]


def looked_at(shape: Shape) -> list[tuple[WorkerId, dict[str, str]]]:
    """The first, the middle and the last host, with their variables."""
    torch = {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": shape.devices // shape.hosts}
    job = job_on(shape, backend="Torch", torch=torch)
    resolution = resolve(job.spec)
    hosts = workers(resolution.layout, 1)
    data = config_map(job, resolution, 1)["data"]
    few = [hosts[index] for index in sorted({0, len(hosts) // 2, len(hosts) - 1})]
    return [(worker, pod_env(job, resolution, worker, data) | device_plugin(shape)) for worker in few]


@dataclass(frozen=True)
class Told:
    """What TorchTPU says. `known`: the topology of a host, by its generation and number of chips. `layouts`: for each
    of SHAPES and each host looked at, what its processes find in their environment."""

    known: dict[tuple[str, int], str]
    layouts: list[list[tuple[WorkerId, dict[str, str]]]]


@functools.cache
def told() -> Told:
    """One process tells it all: to import TorchTPU takes longer."""
    hosts = [looked_at(shape) for shape in SHAPES]
    asked: list[dict[str, Any]] = [
        {"generation": shape.generation, "processes": shape.devices // shape.hosts, "env": env}
        for shape, of_shape in zip(SHAPES, hosts, strict=True)
        for _, env in of_shape
    ]
    ran = second.run("-m", "tests.stacks.launch", given=json.dumps(asked))
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows, answers = json.loads(ran.stdout.splitlines()[-1])
    known = {(name, count): mesh for name, of_hosts in rows.items() for count, mesh in of_hosts}
    gained = iter(answers)
    return Told(known, [[(worker, env | next(gained)) for worker, env in of_shape] for of_shape in hosts])


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[f"{s.generation}-{s.topology}-{s.hosts}h" for s in SHAPES])
def test_torch_tpu_lays_out_the_slice_that_was_resolved(number: int) -> None:
    shape, hosts = SHAPES[number], told().layouts[number]
    per_host = shape.devices // shape.hosts
    sides = [int(side) for side in shape.topology.split("x")]
    for worker, env in hosts:
        assert "error" not in env, env["error"]
        names = env["TPU_WORKER_HOSTNAMES"].split(",")
        addresses = env["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
        rank = int(env["NODE_RANK"]) * per_host
        assert addresses[rank : rank + per_host] == [f"{names[worker.host]}:{8070 + i}" for i in range(per_host)]
        assert len(addresses) == shape.devices
        assert env["NNODES"] == str(shape.hosts)
        assert env["MASTER_ADDR"] in (names[0], f"{names[0]}.default.svc")
        mesh = [int(side) for side in env["TORCH_TPU_TOPOLOGY"].split(",")]
        assert mesh[: len(sides)] == sides
        assert math.prod(mesh) == shape.devices
    agreed = {(env["TORCH_TPU_SLICEBUILDER_ADDRESSES"], env["TORCH_TPU_TOPOLOGY"]) for _, env in hosts}
    assert len(agreed) == 1


def test_a_single_hosts_topology_is_what_torch_tpu_would_find_itself() -> None:
    """So that our spelling of a topology is its own: it writes one for the chips of a host."""
    ours = {}
    for shape, hosts in zip(SHAPES, told().layouts, strict=True):
        if shape.hosts == 1:
            ours[shape.generation, shape.devices] = hosts[0][1]["TORCH_TPU_TOPOLOGY"]
    theirs = told().known
    assert ours == {key: theirs[key] for key in ours}


def test_a_process_reads_its_place_from_the_layout_before_it_looks_for_chips() -> None:
    """It says so, and then ends, for there are none."""
    number = next(index for index, shape in enumerate(SHAPES) if (shape.generation, shape.topology) == ("v5e", "4x4"))
    worker, env = told().layouts[number][-1]
    local_rank, per_host, world = 1, 4, 16
    rank = int(env["NODE_RANK"]) * per_host + local_rank
    assert (worker.host, rank) == (3, 13)
    ran = second.run(
        "-c",
        "import torch; from torch_tpu import _loader; _loader._init_device('tpu'); torch.zeros(1, device='tpu')",
        **env,
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(per_host),
    )
    addresses, topology = env["TORCH_TPU_SLICEBUILDER_ADDRESSES"], env["TORCH_TPU_TOPOLOGY"]
    own_port = addresses.split(",")[rank].rpartition(":")[2]
    assert f"{rank} {local_rank} {world} {addresses} {own_port} {topology}" in ran.stderr
    assert ran.returncode != 0
