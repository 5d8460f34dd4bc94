"""A whole gang's doctors at their checkups: one thread per replica, real store and parameters, the device made up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from tests.trainer.gang_processes import run_spec
from tpu_contract.protocol import Phase
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.clock import WARM_UP_STEPS, Clock, StepPace
from tpu_trainer.contract.errors import DivergedError
from tpu_trainer.contract.findings import Finding, NumericalHealth
from tpu_trainer.doctor.doctor import Doctor
from tpu_trainer.gang.backends.base import Counters


class Table:
    """A gather between threads."""

    def __init__(self, world: int) -> None:
        self._rows: dict[int, list[float]] = {}
        self._barrier = threading.Barrier(world)

    def gather(self, rank: int, row: Sequence[float]) -> list[list[float]]:
        self._rows[rank] = torch.tensor(row, dtype=torch.float32).tolist()
        self._barrier.wait()
        rows = [self._rows[peer] for peer in range(self._barrier.parties)]
        self._barrier.wait()
        return rows


class Replica:
    """A replica on host `rank`, with what its device counts, its program, its time and its parameters laid open."""

    reads_free = False

    def __init__(self, rank: int, world: int, table: Table, store: TCPStore) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.counted = Counters()
        self.program, self.hashed = "usual", 0
        self.time = 0.0
        self.clock = Clock(lambda: self.time)
        self.told: list[Finding] = []
        self.gather = lambda row: table.gather(rank, row)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        spec = parse_run_spec(run_spec())
        self.doctor = Doctor(
            spec,
            self,
            self.clock,
            self.told.append,
            model=self.model,
            host=rank,
            pace=StepPace(lambda: self.time),
            health=NumericalHealth(),
        )

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compilations(self) -> int:
        return self.counted.compilations

    def counters(self) -> Counters:
        return self.counted

    def graph_hash(self, tensors: Sequence[Tensor]) -> str:
        self.hashed += 1
        return self.program

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def spend(self, phase: Phase, seconds: float) -> None:
        self.clock.enter(phase)
        self.time += seconds

    def step(self, step: int, **spent: float) -> None:
        for phase, seconds in spent.items():
            self.spend(Phase(phase), seconds)
        self.doctor.before_sync(step, [])
        self.doctor.after_step(step, torch.zeros(8))


class Gang:
    def __init__(self, world: int) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        table = Table(world)
        self.replicas = [
            Replica(rank, world, table, TCPStore("127.0.0.1", server.port, is_master=False)) for rank in range(world)
        ]
        self._server = server
        self._step = 0

    def all(self, work: Callable[[Replica], Any]) -> list[BaseException | None]:
        """What each replica's work raised."""
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            return [future.exception() for future in [threads.submit(work, one) for one in self.replicas]]

    def steps(self, count: int, work: Callable[[Replica], dict[str, float]] = lambda one: {}) -> None:
        for _ in range(count):
            self._step += 1
            assert self.all(lambda one: one.step(self._step, **work(one))) == [None] * len(self.replicas)

    def checkup(self, *, last: bool = False) -> list[BaseException | None]:
        return self.all(lambda one: one.doctor.checkup(self._step, last=last))

    def told(self) -> list[list[str]]:
        """The checks that have found something, per replica."""
        return [[finding.check for finding in one.told] for one in self.replicas]


@pytest.fixture
def gang() -> Gang:
    gang = Gang(3)
    gang.steps(WARM_UP_STEPS)
    return gang


def test_programs_are_compared_in_the_first_steps_only(gang: Gang) -> None:
    gang.steps(5)
    assert gang.checkup() == [None] * 3
    gang.steps(5)
    assert [one.hashed for one in gang.replicas] == [WARM_UP_STEPS] * 3


def test_a_replica_that_compiles_alone_is_named_and_programs_are_compared_again(gang: Gang) -> None:
    gang.replicas[1].counted = Counters(compilations=2)
    gang.steps(1)
    gang.checkup()
    assert gang.told()[0] == ["UnequalCompilations"]
    assert "replica 1 compiled 2 new" in gang.replicas[0].told[0].message
    assert "replicas 0" in gang.replicas[0].told[0].message
    assert "2 0" in gang.replicas[0].told[0].message
    gang.steps(3)
    assert [one.hashed for one in gang.replicas] == [WARM_UP_STEPS + 1] * 3
    gang.checkup()
    gang.steps(1)
    assert [one.hashed for one in gang.replicas] == [WARM_UP_STEPS + 1] * 3


def test_replicas_that_compiled_different_programs_end_at_the_next_step(gang: Gang) -> None:
    for one in gang.replicas:
        one.counted = Counters(compilations=1)
    gang.steps(1)
    gang.checkup()
    gang.replicas[2].program = "another"
    errors = gang.all(lambda one: one.step(6))
    assert ["in step 6 replica 2 " in str(error) for error in errors] == [True] * 3


def test_one_bit_in_one_parameter_ends_all_replicas_and_names_it(gang: Gang) -> None:
    gang.checkup()
    gang.replicas[1].model[2].weight.data.view(torch.int32)[1, 2] ^= 1
    gang.steps(1)
    errors = gang.checkup()
    assert {type(error) for error in errors} == {DivergedError}
    (text,) = {str(error) for error in errors}
    assert text.startswith("after step 4 the parameters")
    assert "first in 2.w" in text
    assert "replica 1" in text
    assert "replicas 0" in text


def test_buffers_belong_to_each_replica(gang: Gang) -> None:
    gang.replicas[1].model[1].running_mean += 1
    assert gang.checkup() == [None] * 3


def test_a_slow_host_is_named_at_the_second_checkup_and_not_again(gang: Gang) -> None:
    def uneven(one: Replica) -> dict[str, float]:
        return {"host": 0.3, "device": 0.1} if one.rank == 1 else {"host": 0.1, "device": 0.3}

    for expected in ([], ["StragglerHost"], ["StragglerHost"]):
        gang.steps(10, uneven)
        gang.checkup()
        assert gang.told() == [expected] * 3
    assert gang.replicas[0].told[0].message.startswith("host 1 is slow: its own work")
    assert "3.0 times" in gang.replicas[0].told[0].message
    assert "50" in gang.replicas[0].told[0].message


def test_a_host_that_was_slow_once_is_not_named(gang: Gang) -> None:
    for slow in (True, False):
        gang.steps(10, lambda one, slow=slow: {"host": 0.3 if slow and one.rank == 1 else 0.1, "device": 0.2})
        gang.checkup()
    assert gang.told() == [[]] * 3


def test_a_host_that_waits_for_its_data_is_named(gang: Gang) -> None:
    gang.steps(10, lambda one: {"input": 0.02 + 0.1 * (one.rank == 2), "host": 0.1, "device": 0.3})
    gang.checkup()
    assert gang.told() == [["InputBound"]] * 3
    assert "23% of the time is spent" in gang.replicas[0].told[0].message
    assert "host 2" in gang.replicas[0].told[0].message


def test_short_intervals_are_joined_until_they_are_long_enough_to_judge(gang: Gang) -> None:
    for _ in range(3):
        assert gang.told() == [[]] * 3
        gang.steps(1, lambda one: {"input": 0.4, "host": 0.4})
        gang.checkup()
    assert gang.told() == [["InputBound"]] * 3


def test_the_last_checkup_judges_the_only_interval_however_short(gang: Gang) -> None:
    gang.steps(4, lambda one: {"input": 0.05, "host": 0.3 if one.rank == 1 else 0.1})
    gang.checkup()
    assert gang.told() == [[]] * 3
    gang.checkup(last=True)
    assert gang.told() == [["InputBound", "StragglerHost"]] * 3


def test_the_last_checkup_calls_a_host_slow_that_was_so_in_the_only_long_interval(gang: Gang) -> None:
    gang.steps(10, lambda one: {"host": 0.3 if one.rank == 1 else 0.1})
    gang.checkup()
    assert gang.told() == [[]] * 3
    gang.steps(2)
    gang.checkup(last=True)
    assert gang.told() == [["StragglerHost"]] * 3


def test_evaluations_and_checkpoints_do_not_count_as_time_of_steps(gang: Gang) -> None:
    gang.steps(10, lambda one: {"evaluate": 10.0, "checkpoint": 10.0, "input": 0.05, "host": 0.5})
    gang.checkup()
    assert gang.told() == [[]] * 3
