"""The pods' environment, plus what GKE's device plugin adds, through torch_xla's own topology code.

This needs no TPU: `configure_topology` is arithmetic on environment variables. For every shape that GKE offers, the
processes that it would start must agree with each other and with `status.resolved`.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.contract.device_plugin import device_plugin, injected, node_of
from tests.contract.pods import worker_environments
from tests.contract.slices import job_on, pod_env
from tpu_trainer.worker.tpu_host import prepare
from tpu_training_operator.api.catalogue import Generation, Shape, generations
from tpu_training_operator.domain.job.naming import workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.shared import config_map

# torch_xla 2.9 has no bounds for v3-16.
UNKNOWN_TO_TORCH_XLA = ("v3-16",)
# All workers and processes of a small slice. Of a large one the first, the middle and the last worker, and of each the
# first and the last process, because each lists every address.
SMALL = 16

SHAPES = [
    pytest.param(generation, shape, id=f"{shape.generation}-{shape.topology}-{shape.chips_per_host}t")
    for generation in generations().values()
    if generation.on_gke
    for shape in generation.shapes
    if shape.accelerator_type not in UNKNOWN_TO_TORCH_XLA
]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def process_env(env: Mapping[str, str], local_rank: int, processes: int) -> dict[str, str]:
    """What torch_xla derives from the host's variables for one of its processes."""
    # Here, so that a lane that runs other tests does not import torch_xla.
    from torch_xla._internal import tpu

    os.environ.clear()
    os.environ.update(env)
    tpu.configure_topology(local_rank, processes)
    return dict(os.environ)


@pytest.mark.parametrize(("generation", "shape"), SHAPES)
def test_torch_xla_sees_the_slice_that_was_resolved(generation: Generation, shape: Shape) -> None:
    job = job_on(shape)
    resolution = resolve(job.spec)
    data = config_map(job, resolution, 1)["data"]
    hosts = workers(resolution.layout, 1)
    is_small = len(hosts) <= SMALL
    looked_at = hosts if is_small else [hosts[0], hosts[len(hosts) // 2], hosts[-1]]
    processes = shape.chips_per_host * generation.processes_per_chip
    world = len(hosts) * processes
    devices_per_process = generation.devices_per_chip // generation.processes_per_chip
    assert world * devices_per_process == resolution.resolved.replicas

    for worker in looked_at:
        env = pod_env(job, resolution, worker, data) | device_plugin(shape)
        host = env["TPU_WORKER_HOSTNAMES"].split(",")[worker.host]
        for local_rank in range(0, processes, 1 if is_small else max(1, processes - 1)):
            process = process_env(env, local_rank, processes)
            addresses = process["TPU_PROCESS_ADDRESSES"].split(",")
            task = int(process["CLOUD_TPU_TASK_ID"])
            assert math.prod(int(side) for side in process["TPU_PROCESS_BOUNDS"].split(",")) == world
            assert len(addresses) == world
            assert task == worker.host * processes + local_rank
            assert addresses[task] == f"{host}:{process['TPU_PROCESS_PORT']}"
            assert process["TPU_VISIBLE_CHIPS"] == str(local_rank)


@pytest.mark.parametrize("local_rank", [0, 3, 7])
def test_each_process_of_a_privileged_worker_has_a_chip_of_its_own(local_rank: int, tmp_path: Path) -> None:
    """The plugin names all chips of a tpu7x host for a privileged container, and torch_xla keeps what it finds."""
    shape = next(shape for shape in generations()["tpu7x"].shapes if shape.topology == "2x2x1")
    (environ,) = worker_environments(job_on(shape))
    environ |= injected(node_of(shape), visible=(0, 1, 2, 3))
    assert process_env(environ, local_rank, 8)["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    prepare(environ, tmp_path)
    assert process_env(environ, local_rank, 8)["TPU_VISIBLE_CHIPS"] == str(local_rank)
