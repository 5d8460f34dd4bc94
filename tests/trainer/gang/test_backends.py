"""What every backend offers beside the exchange: gather, store, hashes, counters, devices."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import plain
from tests.trainer.gang_processes import DEADLINE, TWO_PER_HOST, Gang, Launcher, chips, run_spec
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import TorchSpec, parse_run_spec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.gang.backends.base import map_tensors
from tpu_trainer.gang.backends.rendezvous import Seat
from tpu_trainer.gang.backends.torch_dist import find_device

GANGS: dict[str, tuple[dict[str, Any], dict[str, str], int]] = {
    "torch": ({"backend": "torch", "hosts": 2, "torch": TWO_PER_HOST}, {}, 4),
    "xla": ({"backend": "xla", "hosts": 2}, {}, 2),
    "chips": ({"backend": "xla", "hardware": "TPU", "replicas": 2}, chips(2), 2),
    "xla-spmd": ({"backend": "xla-spmd", "replicas": 4}, {}, 1),
}
"""Changes of the run spec, variables, and how many processes the gang has."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Per gang what its processes found, in the order of their ranks; every gang runs once.

    `test_endings`, `test_doctor` and `test_chips` start the others by the real command."""
    launcher = Launcher(tmp_path_factory.mktemp("gangs"))
    results: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in results:
            changes, env, _ = GANGS[name]
            real = name == "xla-spmd"
            gang = launcher.start(run_spec(**changes), module="tests.trainer.control_plane", real=real, **env)
            assert set(gang.wait()) == {0}, gang.output()
            lines = [line for host in gang.hosts for line in host.output.splitlines() if line.startswith("found ")]
            told = [json.loads(line.removeprefix("found ")) for line in lines]
            results[name] = sorted(told, key=lambda one: one["rank"])
        return results[name]

    yield of
    launcher.reap()


@pytest.mark.parametrize("name", GANGS)
def test_gather_returns_all_rows_in_rank_order_on_every_process(found: Any, name: str) -> None:
    world = GANGS[name][2]
    tables = [[[rank, value] for rank in range(world)] for value in (0.5, 0.25)]
    assert [one["gathered"] for one in found(name)] == [tables] * world


@pytest.mark.parametrize(("name", "met"), [("torch", 4), ("xla", 2), ("chips", 2), ("xla-spmd", None)])
def test_all_processes_share_one_store_and_a_single_process_has_none(found: Any, name: str, met: int | None) -> None:
    assert [one["store"] for one in found(name)] == [met] * GANGS[name][2]


@pytest.mark.parametrize(("name", "terms"), [("torch", 4), ("xla", 2), ("chips", 2), ("xla-spmd", 1)])
def test_a_reduction_sums_one_term_per_process_but_the_partitioner_averages_itself(
    found: Any, name: str, terms: int
) -> None:
    assert {one["terms"] for one in found(name)} == {terms}


@pytest.mark.parametrize("name", ["xla", "chips"])
def test_graph_hashes_differ_exactly_if_the_programs_do(found: Any, name: str) -> None:
    first, second = found(name)
    assert first["hash"] == second["hash"]
    assert first["branch_hash"] != second["branch_hash"]


def test_an_eager_backend_has_no_graph_hash(found: Any) -> None:
    assert [one["hash"] for one in found("torch")] == [None] * 4


@pytest.mark.parametrize("name", ["xla", "xla-spmd"])
def test_host_reads_of_user_code_are_counted_and_the_backends_own_are_not(found: Any, name: str) -> None:
    assert [(one["own_reads"], one["reads"] >= 2) for one in found(name)] == [(0, True)] * GANGS[name][2]


@pytest.mark.parametrize("name", ["xla", "xla-spmd"])
def test_compilations_executions_and_operations_without_a_kernel_are_counted(found: Any, name: str) -> None:
    for one in found(name):
        assert min(one["compilations"], one["executions"]) >= 1
        assert one["compile_seconds"] > 0
        assert list(one["fallbacks"]) == ["aten::nonzero"]


def test_spmd_shards_rows_over_the_devices_and_replicates_the_rest(found: Any) -> None:
    (one,) = found("xla-spmd")
    assert one["shards"] == {"rows": [[4, 8]] * 4, "uneven": [[3, 8]] * 4, "number": [[]] * 4, "numbers": [[1, 2]] * 4}


SPAWNS, FORKS = "tpu_trainer", "tests.trainer.forked_replicas"
"""A host that starts its processes as it does in a pod, and one that saves them the imports."""


def start_two_per_host(launcher: Launcher, hosts: int, module: str = FORKS, **changes: Any) -> Gang:
    spec = run_spec(backend="torch", hosts=hosts, torch=TWO_PER_HOST, **changes)
    return launcher.start(spec, module=module)


@pytest.mark.parametrize(("hosts", "module"), [(1, SPAWNS), (2, FORKS)], ids=["spawned", "forked"])
def test_two_processes_per_host_follow_plain_pytorch(launcher: Launcher, hosts: int, module: str) -> None:
    gang = start_two_per_host(launcher, hosts, module)
    assert set(gang.wait()) == {0}, gang.output()
    assert gang.losses() == pytest.approx(plain.small("sgd"), abs=1e-5)


def test_sigterm_to_one_host_stops_all_processes_of_all_hosts_after_one_step(launcher: Launcher) -> None:
    gang = start_two_per_host(launcher, 2, trainSteps=10_000_000)
    gang.hosts[0].wait_for("step 10/")
    gang.hosts[1].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [ExitCode.Preempted] * 2, gang.output()
    assert {host.message()["step"] for host in gang.hosts} == {len(gang.losses())}


def test_a_killed_process_names_its_signal_on_its_host_and_is_a_lost_peer_elsewhere(launcher: Launcher) -> None:
    gang = start_two_per_host(launcher, 2, entrypoint="tests.trainer.tasks:one_process_dies")
    assert gang.wait() == [ExitCode.PeerLost, ExitCode.InternalError], gang.output()
    assert "ended by SIGKILL" in gang.hosts[1].message()["message"]


def test_a_process_that_exits_with_0_during_training_has_failed(launcher: Launcher) -> None:
    gang = start_two_per_host(launcher, 1, entrypoint="tests.trainer.tasks:one_process_leaves")
    assert gang.wait() == [ExitCode.UserError], gang.output()
    assert "exited with code 0 before" in gang.hosts[0].message()["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_killed_supervisor_leaves_no_process_that_trains_on(launcher: Launcher) -> None:
    (host,) = start_two_per_host(launcher, 1, trainSteps=10_000_000).hosts
    host.wait_for("step 10/")
    children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()
    ends = [os.pidfd_open(int(child)) for child in children]
    host.process.send_signal(signal.SIGKILL)
    for end in ends:
        assert select.select([end], [], [], DEADLINE) == ([end], [], [])
        os.close(end)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (TorchSpec("cuda", "nccl", 1), r'trainer\.torch\.device: torch \S+ finds no "cuda" on this host, but cpu'),
        (TorchSpec("tpu", "tpu_dist", 1), r'trainer\.torch\.device: torch \S+ finds no "tpu" on this host, but cpu'),
        (TorchSpec("toaster", "gloo", 1), r'trainer\.torch\.device: torch \S+ finds no "toaster"'),
        (
            TorchSpec("cpu", "tpu_dist", 1),
            r'trainer\.torch\.collectives: torch \S+ has no "tpu_dist" for device "cpu", but',
        ),
        (TorchSpec("cpu", "nccl", 1), r"trainer\.torch\.collectives: .*, but .*gloo"),
    ],
)
def test_a_device_or_collectives_that_torch_lacks_are_a_bad_spec(chosen: TorchSpec, message: str) -> None:
    with pytest.raises(BadSpecError, match=message):
        find_device(chosen, local_rank=0)


def test_each_process_takes_its_own_device_and_too_few_devices_are_a_bad_spec(monkeypatch: Any) -> None:
    """With stand-ins for the devices and their collectives: no accelerator is needed to choose one."""
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert find_device(TorchSpec("cuda", "nccl", 2), local_rank=1) == torch.device("cuda", 1)
    assert taken == [1]
    with pytest.raises(BadSpecError, match=r"4 processes .* 2 of cuda"):
        find_device(TorchSpec("cuda", "nccl", 4), local_rank=1)


@pytest.mark.parametrize(
    ("changes", "several"),
    [
        ({"backend": "torch"}, False),
        ({"backend": "torch", "torch": TWO_PER_HOST}, True),
        ({"backend": "xla"}, False),
        ({"backend": "xla", "hardware": "TPU"}, True),
        ({"backend": "xla-spmd"}, False),
        ({"backend": "xla-spmd", "hardware": "TPU"}, False),
    ],
)
def test_a_host_has_several_processes_for_chips_or_if_the_spec_says_so(changes: dict[str, Any], several: bool) -> None:
    assert parse_run_spec(run_spec(**changes)).process_per_device is several


def test_seats_count_the_processes_host_by_host(tmp_path: Any) -> None:
    hosts = [WorkerEnvironment(tmp_path, index, 3, "127.0.0.1", 1) for index in range(3)]
    numbers = [Seat.of_local(host, local_rank, per_host=4).number for host in hosts for local_rank in range(4)]
    assert numbers == list(range(12))


def test_values_that_are_not_tensors_pass_through_to_device_unchanged() -> None:
    position = object()
    batch, passed = map_tensors(lambda tensor: tensor.to("meta"), (torch.zeros(2), position))
    assert (batch.device.type, passed) == ("meta", position)


def test_gradients_pass_through_a_frozen_norm_on_xla_as_on_a_cpu(launcher: Launcher) -> None:
    said = launcher.run_on_xla("tests.trainer.frozen_norm_on_xla")
    assert float(said.rpartition("distance: ")[2]) < 1e-5


def test_xlas_barrier_waits_until_the_device_has_done_its_work(launcher: Launcher) -> None:
    assert "unfinished: 0 of 3\n" in launcher.run_on_xla("tests.trainer.barrier_on_xla")


def test_the_wait_for_a_late_batch_begins_when_xlas_device_has_done_its_work(launcher: Launcher) -> None:
    assert "finished: 3 of 3\n" in launcher.run_on_xla("tests.trainer.feed_on_xla")
