"""The doctor of one replica. It reports findings, and raises only if the run must not continue.

The loop calls it at fixed places. In each step:
    before_sync   before anything sends traced work to the device: the exchange, and the sync
    after_step    after the sync
    set_aside     around work outside of steps: an evaluation, an exchange by the trainer itself
Every hundred steps it calls `checkup`, before a checkpoint and at the end `judge_parameters`; both are collectives. The
loop spends exchange and sync in Phase.DEVICE, so that a slow host can be distinguished from hosts that wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tpu_contract.protocol import PROGRAM_CHECKS, XLA_CHECKS, Check, Phase
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.clock import WARM_UP_STEPS, Clock, StepPace
from tpu_trainer.contract.errors import DivergedError
from tpu_trainer.contract.findings import Finding, FindingReporter, NumericalHealth
from tpu_trainer.doctor.agreement import (
    Programs,
    are_finite,
    checksums,
    find_odd_ranks,
    replicas,
    running_statistics,
)
from tpu_trainer.doctor.counts import StepCounts
from tpu_trainer.doctor.finite import AVERAGE, STATISTICS, WEIGHTS, Finiteness
from tpu_trainer.doctor.padding import padding_advice, products_of, rows_of
from tpu_trainer.doctor.stragglers import SlowHostDetector, Vitals
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import checksum, gather_whole

if TYPE_CHECKING:
    from torch import Tensor, nn


class Doctor:
    """Runs all checks. `model` is on its device; `host`: this host's index in the job; `pace`: for the watchdog;
    `health`: from the checkpoint that the run continues from; `average`: the averaged weights by name, kept up to date
    by their owner; `known_steps`: the trainer makes the steps, and so knows how many programs a step has.
    """

    def __init__(
        self,
        spec: RunSpec,
        backend: Backend,
        clock: Clock,
        tell: Callable[[Finding], None],
        *,
        model: nn.Module,
        host: int,
        pace: StepPace,
        health: NumericalHealth,
        average: Mapping[str, Tensor] | None = None,
        known_steps: bool = True,
    ) -> None:
        self._spec, self._backend, self._clock = spec, backend, clock
        self._model, self._host, self._pace = model, host, pace
        # A divided optimizer joins its parts in several rounds. Where hosts exchange values in host memory, each round
        # is a separate program.
        self._known_steps = known_steps and not (backend.reads_free and spec.sharding != "Replicated")
        self._average = {} if average is None else average
        # Parameters that are frozen from the start may hold infinities on purpose, such as a mask.
        self._frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self._findings = FindingReporter(tell)
        self.finiteness = Finiteness(spec.on_not_finite, self._findings, spec.train_steps, health)
        self._programs = Programs(backend, clock)
        # Every pass of a step is one execution, and so is the update if the exchange is in host memory.
        executions = spec.batch.accumulation + (1 if backend.reads_free else 0) if self._known_steps else math.inf
        self._counts = StepCounts(backend, self._findings, executions)
        self._slow_hosts = SlowHostDetector(self._findings)
        self._since = clock.seconds()
        self._compare_once_more = False
        self._compilations = 0

    @property
    def recompilations(self) -> int:
        """The number of programs that steps after the warm-up have compiled on this replica."""
        return self._counts.compilations

    @property
    def unavailable_checks(self) -> list[Check]:
        """The checks that cannot find anything in this run, because their events are not counted."""
        if self._spec.backend == "torch":
            # torch.compile counts its programs; TorchTPU does not count what it fuses.
            return [*XLA_CHECKS] if self._spec.torch.execution == "Compile" else [*XLA_CHECKS, *PROGRAM_CHECKS]
        return [] if self._known_steps else [Check.MID_STEP_EXECUTION]

    def before_sync(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Compares the pending programs of all replicas, in the first steps and after recompilations; other steps leave
        `tensors` unread.

        Raises:
            DivergedError: in every replica, before any of them has sent the program to its device.
            PeerLostError: a replica did not arrive at the comparison.
        """
        if self._counts.steps < WARM_UP_STEPS or self._compare_once_more:
            self._programs.compare(step, list(tensors))

    def after_step(self, step: int, batch: Any) -> None:
        """Counts a step. `batch`: the batch of its last pass."""
        self._compare_once_more = False
        self._counts.after_step(step, batch)
        self._pace.step_done(step)
        if self._counts.steps == 1:
            self._check_padding(step, batch)
        elif self._counts.steps == WARM_UP_STEPS:
            # Programs are compiled: from now on, times are typical.
            self._since = self._clock.seconds()

    def set_aside(self) -> AbstractContextManager[None]:
        """Excludes what the device's runtime counts in the block from the steps' counts."""
        return self._counts.set_aside()

    def checkup(self, step: int, *, last: bool = False) -> None:
        """Compares times, compilations and parameters of all replicas; a collective. `last`: there is no later checkup.

        Raises:
            DivergedError: in every replica, if their parameters differ.
        """
        if last:
            self._counts.close_window(step)
        with self._clock.during(Phase.DEVICE), self.set_aside():
            digest, sums = 0, None
            if self._backend.world > 1:
                (sums,) = self._backend.to_host([checksums(list(self._model.parameters()))])
                digest = _digest(sums)
            vitals = [Vitals.of(row) for row in self._backend.gather(self._vitals(digest).row())]
            if sums is not None:
                self._check_equal(step, [replica.digest for replica in vitals], sums)
            self._compare_compilations(step, vitals)
            if self._slow_hosts.judge(step, vitals, last=last):
                self._since = self._clock.seconds()

    def judge_parameters(self, step: int) -> None:
        """Tests that parameters and running statistics are finite, and the parameters equal in all replicas; a
        collective.

        Raises:
            DivergedError: in every replica, if their parameters differ.
            NotFiniteError: in every replica, if one of them is not finite, unless the recipe allows that.
        """
        with self._clock.during(Phase.DEVICE), self.set_aside():
            self._judge_parameters(step)

    def leave(self) -> None:
        """Announces that this replica fails and makes no further comparison."""
        self._programs.leave()

    def _check_padding(self, step: int, batch: Any) -> None:
        per_replica = self._spec.batch.per_replica
        advice = padding_advice(products_of(self._model), rows_of(batch, per_replica), per_replica)
        if advice is not None and self._spec.backend != "torch":
            self._findings.report(Check.PADDING, step, advice)

    def _vitals(self, parameters: int) -> Vitals:
        spent = {phase: seconds - self._since[phase] for phase, seconds in self._clock.seconds().items()}
        work = spent[Phase.INPUT] + spent[Phase.HOST]
        compilations = self._counts.compilations - self._compilations
        return Vitals(self._host, spent[Phase.INPUT], work, work + spent[Phase.DEVICE], compilations, parameters)

    def _judge_parameters(self, step: int) -> None:
        several = self._backend.world > 1
        weights = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad or name not in self._frozen
        }
        tensors = [
            *((WEIGHTS, name, tensor) for name, tensor in weights.items()),
            *((AVERAGE, name, tensor) for name, tensor in self._average.items()),
            *((STATISTICS, name, tensor) for name, tensor in running_statistics(self._model).items()),
        ]
        values = [are_finite([tensor for _, _, tensor in tensors])] if tensors else []
        if several:
            values.append(checksums(list(self._model.parameters())))
        fetched = self._backend.to_host(values)
        finite = fetched[0].tolist() if tensors else []
        # Counted from one, so that zero means none.
        first_bad = 0 if all(finite) else finite.index(False) + 1
        rows = self._backend.gather([first_bad, _digest(fetched[-1]) if several else 0])
        if several:
            self._check_equal(step, [int(digest) for _, digest in rows], fetched[-1])
        if (first := min((int(bad) for bad, _ in rows if bad), default=0)) == 0:
            return
        part, name, _ = tensors[first - 1]
        self.finiteness.judge_part(step, part, name)

    def _check_equal(self, step: int, digests: Sequence[int], sums: Tensor) -> None:
        if (parties := find_odd_ranks(digests)) is None:
            return
        odd, others = parties
        # All replicas have read the same rows, so all of them arrive at this gather.
        columns = zip(*gather_whole(sums.tolist(), self._backend), strict=True)
        names = (name for name, _ in self._model.named_parameters())
        name = next(name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1)
        raise DivergedError(
            f"after step {step} the parameters of {replicas(odd)} differ from those of {replicas(others)}, first in "
            f"{name}. All replicas were given the same gradients, so one of them changed the parameter differently: "
            "look for an optimizer or hook that depends on the rank, the host or an unseeded random number, and for "
            "code that changes parameters outside the optimizer's step. If it is always the same machine, suspect the "
            "machine",
            step,
        )

    def _compare_compilations(self, step: int, vitals: Sequence[Vitals]) -> None:
        counts = [replica.compilations for replica in vitals]
        self._compilations = self._counts.compilations
        self._compare_once_more = any(counts)
        if (parties := find_odd_ranks(counts)) is None:
            return
        odd, others = parties
        self._findings.report(
            Check.UNEQUAL_COMPILATIONS,
            step,
            f"since the last checkup {replicas(odd)} compiled {max(counts[rank] for rank in odd)} new programs, "
            f"{replicas(others)} {counts[others[0]]}: their batches differ in shape, or a branch depends on their own "
            "data. On TPU all replicas must run the same program in every step, or they wait for each other forever",
        )


def _digest(sums: Tensor) -> int:
    """Returns a checksum of checksums in host memory."""
    return int(checksum(sums.numpy().tobytes()))
