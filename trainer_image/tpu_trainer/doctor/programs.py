"""Do all replicas run the same program? Compared before it is sent to the device; held by `doctor`.

On TPU, replicas whose programs differ wait for each other's collectives for ever, and XLA has no time limit. So the
hashes of the traced graphs are exchanged through the gang's key-value store, which needs no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from tpu_trainer.backends.base import Backend
from tpu_trainer.clock import Clock, Phase
from tpu_trainer.doctor.parties import odd_ones, replicas
from tpu_trainer.errors import DivergedError, PeerLostError

if TYPE_CHECKING:
    from torch import Tensor

AGREE_SECONDS = 1200.0
"""Until a replica that does not come counts as lost. Hosts compile at different speeds, some for many minutes."""

_LAST_WORD_SECONDS = 10.0

_SAME, _DIVERGED, _LEFT = "same", "diverged", "left"


class Programs:
    """Comparisons are numbered; every replica makes all of them, in order.

    Each replica leaves its hash and is counted; the last one to come reads them all and leaves the verdict, for which
    the others wait. Messages grow with the number of replicas, not with its square.
    """

    def __init__(self, backend: Backend, clock: Clock, seconds: float = AGREE_SECONDS) -> None:
        self._backend = backend
        self._clock = clock
        self._limit = timedelta(seconds=seconds)
        self._next = 0

    def compare(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Called by all replicas at the same point of the same step, with what is pending for that step.

        Raises:
            DivergedError: in every replica, when at least one runs another program.
            PeerLostError: a replica did not come in time, or had ended.
        """
        if self._backend.store is None or (program := self._backend.graph_hash(tensors)) is None:
            return
        at = f"program/{self._next}"
        self._next += 1
        # Waiting for the others is no work of this host's.
        with self._clock.during(Phase.DEVICE):
            verdict, _, text = self._exchange(at, program, step).partition(":")
        if verdict == _DIVERGED:
            self._part(at)
            raise DivergedError(text, step)
        if verdict == _LEFT:
            raise PeerLostError(f"step {step}: {text}")

    def leave(self) -> None:
        """This replica fails: whoever waits for it need not wait any longer. Never raises."""
        if (store := self._backend.store) is not None:
            with suppress(RuntimeError):
                text = f"{replicas([self._backend.rank])} failed before its program could be compared"
                store.set(f"program/{self._next}/verdict", f"{_LEFT}:{text}")

    def _exchange(self, at: str, program: str, step: int) -> str:
        store, rank, world = self._backend.store, self._backend.rank, self._backend.world
        assert store is not None
        try:
            store.set(f"{at}/{rank}", program)
            if store.add(f"{at}/present", 1) == world:
                programs = [store.get(f"{at}/{peer}") for peer in range(world)]
                store.set(f"{at}/verdict", verdict_of(programs, step))
            store.wait([f"{at}/verdict"], self._limit)
            verdict = store.get(f"{at}/verdict").decode()
            # Nobody reads it after the verdict; a long run must not fill the store.
            store.delete_key(f"{at}/{rank}")
        except RuntimeError as error:
            raise PeerLostError(f"step {step}, comparing programs: {self._absent(at, error)}") from error
        return verdict

    def _absent(self, at: str, error: RuntimeError) -> str:
        """What is known of a comparison that did not come about: who has not come, or that nobody can be asked."""
        store, world = self._backend.store, self._backend.world
        assert store is not None
        with suppress(RuntimeError):
            absent = [rank for rank in range(world) if not store.check([f"{at}/{rank}"])]
            if absent:
                seconds = self._limit.total_seconds()
                return f"{replicas(absent)} did not come within {seconds:g} s; no word of whether their program differs"
        return str(error).partition("\n")[0]

    def _part(self, at: str) -> None:
        """Returns when all have read the verdict: the process that serves the store takes it along when it ends."""
        store, world = self._backend.store, self._backend.world
        assert store is not None
        with suppress(RuntimeError):
            if store.add(f"{at}/read", 1) == world:
                store.set(f"{at}/all-read", "")
            store.wait([f"{at}/all-read"], timedelta(seconds=_LAST_WORD_SECONDS))


def verdict_of(programs: Sequence[bytes], step: int) -> str:
    """What is left for the others: "same", or "diverged:" and the sentence for a person."""
    if (parties := odd_ones(programs)) is None:
        return _SAME
    odd, others = parties
    return (
        f"{_DIVERGED}:in step {step} {replicas(odd)} would run another program than {replicas(others)}; on TPU they "
        "would wait for each other for ever. Look for a branch on the rank or host in the task, for batches whose "
        "shapes differ between hosts, and for Python numbers (not tensors) that differ between them"
    )
