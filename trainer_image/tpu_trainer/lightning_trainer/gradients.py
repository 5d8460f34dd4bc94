"""Gradients averaged over the replicas where Lightning makes them, and the signals that travel with them.

With automatic optimization that is once a step, between the last backward pass and what hooks and clipping do to the
gradients. With manual optimization a module makes its steps itself, so gradients are averaged after every backward
pass: whatever it then reads, clips or steps with is the gang's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import LOSS, WEIGHT, Flags, Loss, Sums, exchange
from tpu_trainer.loop.instruments import Instruments


class Gradients:
    """`watch` says which parameters; `add` counts a backward pass in; `average` is a collective.

    Replicas may differ in which parameters have a gradient, but not in how often `average` is called. To average a
    gradient again, grown since or not, does no harm: what was averaged before is equal on all replicas.
    """

    def __init__(
        self, backend: Backend, instruments: Instruments, stop: StopFlag, *, manual: bool, last: float | None = None
    ) -> None:
        """`manual`: the module makes its steps itself. `last`: the loss of the step before this process's first."""
        self._manual = manual
        self._backend, self._instruments, self._stop = backend, instruments, stop
        self._parameters: list[nn.Parameter] = []
        self._known: set[nn.Parameter] = set()
        self._changed: set[nn.Parameter] = set()
        self._begun: int | None = None
        self._drawn = 0
        self._loss: Loss | None = None
        self._sums: Sums | None = None
        self._flags = Flags(backend)
        self._last = backend.to_device(torch.tensor([last or 0.0, 1.0]))

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """In the model's order, which is the same in all replicas. Those that are known already are not added again."""
        for parameter in parameters:
            if parameter not in self._known and parameter.requires_grad:
                self._known.add(parameter)
                self._parameters.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._changed.add)  # type: ignore[no-untyped-call]

    def seed(self, drawn: int) -> None:
        """Seeds the device's generator for a batch."""
        self._drawn = drawn
        self._backend.seed(drawn)

    def forward_begins(self, step: int) -> None:
        """Prepares a forward pass of step `step`; called before each of them."""
        if step != self._begun:
            self._begun = step
            self._instruments.forward_begins()
            # An exchange of buffers has moved the generator on.
            self._backend.seed(self._drawn)

    def add(self, loss: Tensor, weight: Tensor) -> None:
        """A backward pass was made. `loss`: times its weight; both of shape []."""
        own = Loss(loss.detach().reshape(()).float(), weight.detach().reshape(()).float())
        self._loss = own if self._loss is None else self._loss.plus(own)

    def average(self, step: int) -> None:
        """Replaces the changed gradients by the mean over the replicas, by weight. A replica without a backward pass
        takes part with nothing.

        Raises:
            UserCodeError, DivergedError, PeerLostError: as `exchange` and `Instruments.exchange`.
        """
        nothing = torch.zeros((), device=self._backend.device)
        loss, self._loss = self._loss or Loss(nothing, nothing), None
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        # Where all replicas run one program they know without asking which gradients need not be sent again.
        done = [(p, p.grad) for p in parameters if p.grad is not None and p not in self._changed]
        set_aside = done if self._backend.one_program else []
        for parameter, _ in set_aside:
            parameter.grad = None
        requests = self._flags.requests(stop=self._stop(), save=self._instruments.checkpoints.overdue())
        with self._instruments.exchange(step, loss, parameters):
            sums = exchange(parameters, loss, requests, self._backend)
        for parameter, gradient in set_aside:
            parameter.grad = gradient
        self._changed.clear()
        if self._sums is not None:
            added = sums.signals.clone()
            if not self._manual:
                # An optimizer that asks again (LBFGS, SAM) asks at weights that are not the step's.
                added[LOSS : WEIGHT + 1] = 0
            # The longest gradient of the step; NaN stays NaN.
            sums = Sums(self._sums.signals + added, torch.maximum(self._sums.norm, sums.norm))
        self._sums = sums

    @property
    def pending(self) -> bool:
        """Whether a gradient has changed and is not averaged."""
        return bool(self._changed)

    def signals(self, step: int) -> Sums:
        """The step's; a step in which all replicas skipped their batch has the loss of the one before."""
        if self._sums is None:
            self.average(step)
        assert self._sums is not None
        sums, self._sums = self._sums, None
        signals = sums.signals
        self._last = torch.where(signals[WEIGHT] == 0, self._last.to(signals), signals[LOSS : WEIGHT + 1])
        return Sums(torch.cat([self._last, signals[WEIGHT + 1 :]]), sums.norm)
