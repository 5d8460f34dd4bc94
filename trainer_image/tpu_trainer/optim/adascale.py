"""recipe.scaling.learningRate: AdaScale (Johnson et al. 2020, arXiv:2007.05105, algorithm 1).

With k times the recipe's batch B, one step does the work of r of the recipe's steps, its gain (section 3):

    r = (s + m) / (s / k + m),    1 <= r <= k

where s is the variance of the gradient of B examples, summed over its elements, and m the squared length of its mean.
The step's rate is r times the recipe's at step floor(tau), where tau is the sum of the gains so far, and the training
ends once tau reaches the recipe's steps.

The paper estimates s and m from the gradients of k replicas with B examples each. Here n gradients g_i of b examples
are measured, one for each pass of each replica, with n b = k B. With T the trace of the covariance of one example's
gradient, and g the mean of the g_i,

    E mean |g_i|^2 = m + T / b,    E |g|^2 = m + T / (n b),    s = T / B = T k / (n b)

so s = k / (n - 1) (mean |g_i|^2 - |g|^2) and m = |g|^2 - s / k are unbiased, and for n = k they are the paper's. Both
are averaged over the steps with the decay max(1 - k / 1000, 0) (section 4). The averages start at 0 and lag alike,
which leaves r, a ratio, as it is. An average below 0 counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tpu_trainer.contract.errors import UserCodeError

if TYPE_CHECKING:
    from torch import Tensor

    from tpu_trainer.gang.backends.base import Backend
    from tpu_trainer.gang.exchange import Sums
    from tpu_trainer.optim.schedule import RecipeRate
    from tpu_trainer.task.task import Hyperparameters

FIELD = "recipe.scaling.learningRate"
GAIN, RATE = 4, 5
"""Indices in a step's row, which begins with the state: its gain, and the first group's rate."""

_MEMORY = 1000


@dataclass(frozen=True)
class Gained:
    """What the gains have come to. batch: of the recipe. variance, mean: the averages of s and m. steps, rest: tau, as
    whole steps of the recipe and the rest, so that a long sum stays exact in float32."""

    batch: int
    variance: float = 0.0
    mean: float = 0.0
    steps: float = 0.0
    rest: float = 0.0

    @property
    def examples(self) -> int:
        """The examples that the recipe's own batch would have needed."""
        return math.floor((self.steps + self.rest) * self.batch)

    def in_batches_of(self, batch: int) -> Gained:
        """Returns the same progress in steps of a recipe with another batch."""
        if batch == self.batch:
            return self
        rest, steps = math.modf((self.steps + self.rest) * self.batch / batch)
        return Gained(batch, self.variance * self.batch / batch, self.mean, steps, rest)


class AdaScale:
    """Decides the rate of every step on the device, so that the host need not wait for the gain.

    gained: after the last step that has been read, whose number is `step`. gain: of that step.
    """

    def __init__(self, gained: Gained, step: int, hp: Hyperparameters, backend: Backend, *, skips: bool) -> None:
        """`skips`: a step that is not finite adds nothing.

        Raises:
            UserCodeError: there is no second gradient to compare with.
        """
        self._scale, self._groups = hp.global_batch_size / gained.batch, backend.terms * hp.accumulation_steps
        if self.measures and self._groups < 2:
            raise UserCodeError(
                f"{FIELD}: AdaScale compares the gradients of several replicas or accumulated passes, and this run has "
                "one of a step's gradients; use Linear or SquareRoot"
            )
        self._hp, self._backend, self._skips = hp, backend, skips
        self.gained, self.step, self.gain = gained, step, 1.0
        state = [gained.variance, gained.mean, gained.steps, gained.rest]
        self._state = backend.to_device(torch.tensor(state))
        self._reduction, self._reduced = 1.0, backend.to_device(torch.tensor(1.0))

    @property
    def measures(self) -> bool:
        """Whether the gain is not 1 anyway, so that gradients must be measured."""
        return self._scale > 1

    @torch.no_grad()
    def take(self, sums: Sums, recipe: RecipeRate, base: float) -> tuple[Tensor, Sums]:
        """Takes in a step's squares. Returns the factor of the groups' rates, and the sums with the step's row.
        `base`: the first group's rate at factor 1."""
        variance, mean, steps, rest = self._state.unbind()
        if self.measures:
            variance, mean = self._average(variance, mean, *sums.squares(self._backend))
        noise, signal = variance.clamp(min=0), mean.clamp(min=0)
        least = noise / self._scale + signal
        gain = torch.where(least > 0, (noise + signal) / least, torch.ones_like(least))
        if recipe.reduction != self._reduction:
            # As data, since a number that leaves 1 would be another program.
            self._reduction = recipe.reduction
            self._reduced = self._backend.to_device(torch.tensor(recipe.reduction))
        factor = gain * recipe.scheduled(steps) * self._reduced
        gained = torch.where(sums.finite(self._backend), gain, torch.zeros_like(gain)) if self._skips else gain
        rest = rest + gained
        whole = rest.floor()
        self._state = torch.stack([variance, mean, steps + whole, rest - whole])
        return factor, replace(sums, gain=torch.cat([self._state, torch.stack([gain, factor * base])]))

    def _average(self, variance: Tensor, mean: Tensor, own: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the averages with a step's estimates, unless those are not finite."""
        kept = max(1 - self._scale / _MEMORY, 0.0)
        noise = (own - common) * (self._scale / (self._groups - 1))
        signal = common - noise / self._scale
        finite = torch.isfinite(noise) & torch.isfinite(signal)
        return (
            torch.where(finite, variance * kept + noise * (1 - kept), variance),
            torch.where(finite, mean * kept + signal * (1 - kept), mean),
        )

    def read(self, rows: Sequence[Sequence[float]], step: int) -> None:
        """Takes in what the host has read, up to `step`."""
        if rows:
            *state, self.gain, _ = rows[-1]
            self.gained, self.step = Gained(self.gained.batch, *state), step

    def may_end(self, step: int) -> bool:
        """Returns whether the training may end with `step`, as far as is known, so that the step must be read."""
        return self.gained.steps + 1 + (step - self.step) * self._scale >= self._hp.train_steps

    @property
    def ended(self) -> bool:
        return self.gained.steps >= self._hp.train_steps

    @property
    def expected_end(self) -> int:
        """The step after which the training ends if the gain stays as it is."""
        left = max(0.0, self._hp.train_steps - self.gained.steps - self.gained.rest)
        # A device that only traces has read no gain.
        return min(self.step + math.ceil(left / max(self.gain, 1.0)), self._hp.last_step)

    def state(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint after `step`, which has been read, keeps as JSON."""
        return {**asdict(self.gained), "step": step}


def gained_in(kept: Mapping[str, Any]) -> tuple[Gained, int] | None:
    """Returns what a checkpoint's document has of AdaScale, and its step; None if it was made without."""
    if (state := kept.get("adaScale")) is None:
        return None
    numbers = dict(state)
    step = int(numbers.pop("step"))
    return Gained(**numbers), step
