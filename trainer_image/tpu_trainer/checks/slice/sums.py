"""Sums of known values over the replicas of a host, of a slice and of all slices: exact to the last bit, and timed.

Every replica adds small integers, so that float32 holds every sum exactly, in whatever order it is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpu_contract.run_spec import RunSpec
from tpu_trainer.gang.backends import Backend

_PERIOD, _BLOCK = 61, 16
HOST, SLICE, ALL = "a host", "the slice", "all slices"


@dataclass(frozen=True)
class SumResult:
    """What a process has got. odd: the one process whose part of the sum is wrong, -1 if none is or several are."""

    wrong: bool
    odd: int
    seconds: float


class KnownSums:
    """Makes the sums of this process. hosts: the host of each process. With backend xla-spmd a process is a host, and
    each of its devices adds a row."""

    def __init__(self, backend: Backend, spec: RunSpec, hosts: Sequence[int]) -> None:
        self._backend, self._spec, self.hosts = backend, spec, hosts
        self._rows = spec.slice.replicas // len(hosts) if spec.backend == "xla-spmd" else 1
        self._formed: dict[str, Any] = {}
        slices = _group([host // (spec.slice.hosts // spec.slice.slices) for host in hosts])
        self._groups = {SLICE if len(slices) == 1 else ALL: [list(range(len(hosts)))]}
        if spec.backend == "torch" or (spec.backend, spec.hardware) == ("xla", "TPU"):
            parts = ({HOST: _group(hosts)} if len(hosts) > len({*hosts}) > 1 else {}, {SLICE: slices})
            self._groups = parts[0] | (parts[1] if len(slices) > 1 else {}) | self._groups

    @property
    def levels(self) -> list[str]:
        """The levels over which this backend can sum, the largest last."""
        return list(self._groups)

    def bytes_sent(self, level: str, size: int) -> float:
        """Returns the least that a replica sends for a sum of `size` bytes."""
        members = len(self._groups[level][0]) * self._rows
        return 2 * (members - 1) / members * size

    def measure(self, level: str, size: int) -> list[SumResult]:
        """Sums `size` bytes twice, first to compile; returns the results of all processes. A collective."""
        backend = self._backend
        group = next(group for group in self._groups[level] if backend.rank in group)
        members = [rank * self._rows + row for rank in group for row in range(self._rows)]
        own = [members.index(backend.rank * self._rows + row) for row in range(self._rows)]
        table, blocks = _patterns(members, _PERIOD), _patterns(members, _BLOCK) + 1.0
        # In the second tensor each member has a block of its own, to which the others add zeros.
        mine = torch.zeros(self._rows, len(members), _BLOCK)
        mine[range(self._rows), own] = blocks[own]
        values = backend.to_device([table[own], mine.flatten(1), table.sum(0), blocks.flatten()])
        added, expected = (_repeat(values[place], size // 4) for place in (0, 2))
        backend.sync()

        def compare() -> tuple[bool, int]:
            total, parts = self._sum(level, [added + 0.0, values[1] + 0.0])
            missed = (total.reshape(-1) != expected).to(torch.float32).sum()
            differs = (parts.reshape(-1) != values[3]).reshape(-1, _BLOCK).to(torch.float32).sum(1)
            missing, by_member = backend.to_host([missed, differs])
            odd = {members[place] // self._rows for place in by_member.nonzero().flatten().tolist()}
            return bool(missing) or bool(odd), odd.pop() if len(odd) == 1 else -1

        wrong, odd = compare()
        began = time.perf_counter()
        compare()
        rows = backend.gather([float(wrong), float(odd), time.perf_counter() - began])
        return [SumResult(bool(row[0]), int(row[1]), row[2]) for row in rows]

    def _sum(self, level: str, tensors: list[Tensor]) -> list[Tensor]:
        groups = self._groups[level]
        if self._spec.backend == "xla-spmd":
            return [tensor.sum(0) for tensor in tensors]
        if len(groups) == 1:
            return self._backend.reduce(tensors, self._backend.numbers([0.0]).reshape(-1))[0]
        if self._spec.backend == "xla":
            import torch_xla.core.xla_model as xm

            xm.all_reduce(xm.REDUCE_SUM, tensors, groups=groups)
            return tensors
        if level not in self._formed:
            # All processes form all groups, in the same order.
            formed = [dist.new_group(group) for group in groups]
            self._formed[level] = next(
                own for own, group in zip(formed, groups, strict=True) if self._backend.rank in group
            )
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._formed[level])
        return tensors


def _patterns(members: Sequence[int], count: int) -> Tensor:
    """Returns a row of integers from 0 to 60 for each member, each in another order; shape [members, count]."""
    return ((torch.arange(count) * 7)[None] + torch.tensor(members)[:, None] * 13).remainder(_PERIOD).float()


def _repeat(table: Tensor, count: int) -> Tensor:
    """Returns the last dimension over and over, in `count` elements. Not with Tensor.repeat: torch_xla compiles a
    program with a part for each time."""
    times = count // _PERIOD + 1
    return table.unsqueeze(-2).expand(*table.shape[:-1], times, _PERIOD).flatten(-2)[..., :count]


def _group(keys: Sequence[int]) -> list[list[int]]:
    """Returns the places with equal keys together."""
    return [[place for place, key in enumerate(keys) if key == wanted] for wanted in dict.fromkeys(keys)]
