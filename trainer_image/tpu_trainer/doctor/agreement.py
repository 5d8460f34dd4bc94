"""Whether all replicas run the same programs and hold the same parameters, and which of them do not.

On TPU, replicas whose programs differ wait for each other's collectives forever, and XLA has no time limit. So the
hashes of the traced graphs are compared before a program is sent to the device, through the gang's key-value store,
which needs no device. Parameters are never sent between replicas: they stay equal because replicas with equal values
make equal updates. A difference of one bit means that some update was not equal, and it only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tpu_contract.protocol import Phase
from tpu_trainer.contract.clock import Clock
from tpu_trainer.contract.errors import DivergedError, PeerLostError
from tpu_trainer.contract.findings import ranges
from tpu_trainer.gang.backends.base import Backend

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

AGREE_SECONDS = 1200.0
"""How long to wait for a replica before it counts as lost. Hosts compile at different speeds, some for many minutes."""

_VERDICT_READ_SECONDS = 10.0

_SAME, _DIVERGED, _LEFT = "same", "diverged", "left"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def find_odd_ranks(values: Sequence[Hashable]) -> tuple[list[int], list[int]] | None:
    """Returns the ranks that differ, and the largest group that agrees; of equally large groups, the one with rank 0.

    None if all agree. `values` are in the order of ranks, never empty.
    """
    parties: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        parties.setdefault(value, []).append(rank)
    if len(parties) == 1:
        return None
    # max takes the first of equals, and rank 0's party is the first.
    majority = max(parties.values(), key=len)
    return [rank for rank in range(len(values)) if rank not in set(majority)], majority


def replicas(ranks: Sequence[int]) -> str:
    """Formats ranks as "replica 3" or "replicas 0-2, 5"."""
    return f"replica{'s' if len(ranks) != 1 else ''} {ranges(ranks)}"


class Programs:
    """Compares the replicas' programs. Comparisons are numbered; every replica makes all of them, in order.

    Each replica stores its hash and is counted; the last one reads them all and stores the verdict that the others
    wait for. So the number of messages grows with the number of replicas, not with its square.
    """

    def __init__(self, backend: Backend, clock: Clock, seconds: float = AGREE_SECONDS) -> None:
        self._backend = backend
        self._clock = clock
        self._limit = timedelta(seconds=seconds)
        self._next = 0

    def compare(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Compares programs. All replicas make this call at the same point of the same step, with what is pending for
        it.

        Raises:
            DivergedError: in every replica, if at least one runs another program.
            PeerLostError: a replica did not arrive in time, or had ended.
        """
        if self._backend.store is None or (program := self._backend.graph_hash(tensors)) is None:
            return
        at = f"program/{self._next}"
        self._next += 1
        # Waiting for the others is not this host's work.
        with self._clock.during(Phase.DEVICE):
            verdict, _, text = self._exchange(self._backend.store, at, program, step).partition(":")
        if verdict == _DIVERGED:
            self._wait_for_readers(self._backend.store, at)
            raise DivergedError(text, step)
        if verdict == _LEFT:
            raise PeerLostError(f"step {step}: {text}")

    def leave(self) -> None:
        """Announces that this replica fails, so that the others do not wait for it. Never raises."""
        if (store := self._backend.store) is not None:
            with suppress(RuntimeError):
                text = f"{replicas([self._backend.rank])} failed before its program could be compared"
                store.set(f"program/{self._next}/verdict", f"{_LEFT}:{text}")

    def _exchange(self, store: Store, at: str, program: str, step: int) -> str:
        rank, world = self._backend.rank, self._backend.world
        try:
            store.set(f"{at}/{rank}", program)
            if store.add(f"{at}/present", 1) == world:
                programs = [store.get(f"{at}/{peer}") for peer in range(world)]
                store.set(f"{at}/verdict", _verdict(programs, step))
            store.wait([f"{at}/verdict"], self._limit)
            verdict = store.get(f"{at}/verdict").decode()
            # It is not read after the verdict, and a long run must not fill the store.
            store.delete_key(f"{at}/{rank}")
        except RuntimeError as error:
            why = self._explain_failure(store, at, error)
            raise PeerLostError(f"step {step}, comparing programs: {why}") from error
        return verdict

    def _explain_failure(self, store: Store, at: str, error: RuntimeError) -> str:
        """Returns why a comparison failed: which replicas did not arrive, or that the store cannot be reached."""
        with suppress(RuntimeError):
            absent = [rank for rank in range(self._backend.world) if not store.check([f"{at}/{rank}"])]
            if absent:
                late = f"did not arrive within {self._limit.total_seconds():g} s"
                return f"{replicas(absent)} {late}; whether their program differs is unknown"
        return str(error).partition("\n")[0]

    def _wait_for_readers(self, store: Store, at: str) -> None:
        """Waits until all have read the verdict, since the store ends with the process that serves it."""
        with suppress(RuntimeError):
            if store.add(f"{at}/read", 1) == self._backend.world:
                store.set(f"{at}/all-read", "")
            store.wait([f"{at}/all-read"], timedelta(seconds=_VERDICT_READ_SECONDS))


def _verdict(programs: Sequence[bytes], step: int) -> str:
    """Returns what the others read: "same", or "diverged:" and the message."""
    if (parties := find_odd_ranks(programs)) is None:
        return _SAME
    odd, others = parties
    return (
        f"{_DIVERGED}:in step {step} {replicas(odd)} would run another program than {replicas(others)}; on TPU they "
        "would wait for each other forever. Look for a branch on the rank or host in the task, for batches whose "
        "shapes differ between hosts, for values that only some of them log, and for Python numbers (not tensors) that "
        "differ between them"
    )


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the running statistics of the model's norms, by name. One example can make them infinite although the
    loss is finite, since a norm in training divides by what it sees, and they never recover."""
    return {
        f"{name}.{kind}": statistic
        for name, module in model.named_modules()
        for kind in ("running_mean", "running_var")
        if isinstance(statistic := getattr(module, kind, None), Tensor)
    }


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Sums the bits of each tensor's elements modulo 2**32: int32, shape [len(tensors)], on the tensors' device.

    Integer sums do not depend on the order of the terms, so equal bits give equal sums on every machine; a change of
    one element always changes the sum.
    """
    with torch.no_grad():
        return torch.stack([bits(tensor.detach()).sum(dtype=torch.int32) for tensor in tensors])


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Tests whether all elements of each tensor are finite: bool, shape [len(tensors)], on the tensors' device."""
    with torch.no_grad():
        return torch.stack([torch.isfinite(_testable(tensor.detach())).all() for tensor in tensors])


def _testable(tensor: Tensor) -> Tensor:
    # torch.isfinite does not support float8.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def bits(tensor: Tensor) -> Tensor:
    """Returns the elements' bits as integers: two per element of 64 bits, four per complex element of 128."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    size = values.element_size()
    if size == 1 and not values.is_floating_point():
        return values.to(torch.int32)
    flat = values.reshape(-1)
    bits = _xla_bitcast(size)(flat) if flat.device.type == "xla" else flat.view(_INTEGERS[size])
    return bits.to(torch.int32)


@cache
def _xla_bitcast(size: int) -> Callable[[Tensor], Tensor]:
    """Returns XLA's own bitcast. torch_xla runs `Tensor.view(dtype)` on the CPU, after a transfer of all parameters."""
    from torch_xla.core import xla_builder, xla_op_registry

    types = xla_builder.Type
    kind = {1: types.U8, 2: types.S16, 4: types.S32, 8: types.S32}[size]
    bitcast: Callable[[Tensor], Tensor] = xla_op_registry.register(f"bits{8 * size}", lambda x: x.bitcast(kind))
    return bitcast
