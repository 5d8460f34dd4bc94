"""Averages gradients over the replicas under Lightning's Trainer, with the signals that travel along.

With automatic optimization they are averaged once a step, between the last backward pass and the module's hooks and
clipping. With manual optimization the module makes its own steps, so they are averaged after every `manual_backward`:
whatever the module then reads, clips or steps with is the gang's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.exchange import LOSS, WEIGHT, Flags, Loss, Sums, exchange
from tpu_trainer.loop.instruments import Instruments


class Gradients:
    """The gradients of a step. `average` is a collective.

    Replicas may differ in which parameters have a gradient, but not in how often they call `average`. Averaging a
    gradient twice is harmless: the part averaged before is equal on all replicas.
    """

    def __init__(
        self, backend: Backend, instruments: Instruments, stop: StopFlag, *, manual: bool, last: float | None = None
    ) -> None:
        """`manual`: the module makes its own steps. `last`: the loss of the step before this process's first."""
        self._manual = manual
        self._backend, self._instruments, self._stop = backend, instruments, stop
        self._parameters: list[nn.Parameter] = []
        self._known: set[nn.Parameter] = set()
        self._changed: set[nn.Parameter] = set()
        self._begun: int | None = None
        self._drawn = 0
        self._stepped = False
        # Of a module that accumulates by itself.
        self._unused: set[nn.Parameter] = set()
        self._loss: Loss | None = None
        self._sums: Sums | None = None
        self._flags = Flags(backend)
        self._last = backend.to_device(torch.tensor([last or 0.0, 1.0]))

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the parameters that are not yet known, in the model's order, which is the same in all replicas."""
        for parameter in parameters:
            if parameter not in self._known and parameter.requires_grad:
                self._known.add(parameter)
                self._parameters.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._changed.add)  # type: ignore[no-untyped-call]

    def settle(self, step: int) -> None:
        """See `Instruments.settle`."""
        self._instruments.settle(step)

    def seed(self, drawn: int) -> None:
        """Seeds the device's generator for a batch."""
        self._drawn = drawn
        self._backend.seed(drawn)

    def forward_begins(self, step: int) -> None:
        """Prepares a forward pass of step `step`; called before each pass."""
        if step != self._begun:
            self._begun = step
            self._instruments.forward_begins()
            # Exchanging the buffers has advanced the generator.
            self._backend.seed(self._drawn)

    def add(self, loss: Tensor, weight: Tensor) -> None:
        """Counts a backward pass. `loss`: the loss times its weight; both of shape []."""
        added = Loss(loss.detach().reshape(()).float(), weight.detach().reshape(()).float())
        self._loss = added if self._loss is None else self._loss.plus(added)

    def average(self, step: int) -> None:
        """Replaces the changed gradients by their weighted mean over the replicas. A replica without a backward pass
        contributes weight 0.

        Raises:
            UserCodeError, DivergedError, PeerLostError: see `exchange` and `Instruments.exchange`.
        """
        nothing = torch.zeros((), device=self._backend.device)
        loss, self._loss = self._loss or Loss(nothing, nothing), None
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        # Replicas that run one program agree on which gradients need not be sent again.
        done = [(p, p.grad) for p in parameters if p.grad is not None and p not in self._changed]
        set_aside = done if self._backend.one_program else []
        for parameter, _ in set_aside:
            parameter.grad = None
        requests = self._flags.requests(stop=self._stop(), save=self._instruments.checkpoints.overdue())
        with self._instruments.exchange(step, loss, parameters):
            sums = exchange(parameters, loss, requests, self._backend)
        for parameter, gradient in set_aside:
            parameter.grad = gradient
        self._unused |= self._changed
        self._changed.clear()
        if self._sums is not None:
            added = sums.signals.clone()
            if not self._manual:
                # An optimizer that evaluates again (LBFGS, SAM) does so at other weights than the step's.
                added[LOSS : WEIGHT + 1] = 0
            # The largest norm of the step; NaN stays NaN.
            sums = Sums(self._sums.signals + added, torch.maximum(self._sums.norm, sums.norm))
        self._sums = sums

    def optimizer_steps(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called before a step of the parameters' optimizer. Raises UserCodeError as `signals` does."""
        self._stepped = True
        self._unused.difference_update(parameters)
        self._refuse_own(bool(self._changed))

    def unused(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the gradients, by name, with which no optimizer has made a step yet."""
        named = module.named_parameters()
        return {name: p.grad for name, p in named if p in self._unused and p.grad is not None}

    def _refuse_own(self, has_own: bool) -> None:
        if self._manual and has_own:
            raise UserCodeError(
                "training_step: with automatic_optimization = False gradients must come from "
                "self.manual_backward(loss), which averages them over the replicas; loss.backward() and "
                "torch.autograd.grad leave each replica its own"
            )

    def signals(self, step: int) -> Sums:
        """Returns the signals of the step; if all replicas skipped their batch, with the loss of the step before.

        Raises:
            UserCodeError: a module that makes its own steps has gradients that are not averaged.
        """
        self._refuse_own(bool(self._changed) or (self._stepped and self._sums is None))
        self._stepped = False
        if self._sums is None:
            self.average(step)
        assert self._sums is not None
        sums, self._sums = self._sums, None
        signals = sums.signals
        self._last = torch.where(signals[WEIGHT] == 0, self._last.to(signals), signals[LOSS : WEIGHT + 1])
        return Sums(torch.cat([self._last, signals[WEIGHT + 1 :]]), sums.norm)
