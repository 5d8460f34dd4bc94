"""Sets the learning rates of a module's optimizers: the recipe's schedule, unless the module has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpu_trainer.contract.findings import Finding
from tpu_trainer.lightning.session import overrides
from tpu_trainer.optim.optimizers import find_unused_by, find_unused_schedule
from tpu_trainer.optim.schedule import LearningRateSetter, Ramp
from tpu_trainer.task.horizon import SteppedScheduler, find_differences
from tpu_trainer.task.task import Hyperparameters

if TYPE_CHECKING:
    from torch.optim import Optimizer


class OptimizerRates:
    """One `LearningRateSetter` for each optimizer, once `build` is called. `ramp`: see `LearningRateSetter`."""

    def __init__(
        self, hp: Hyperparameters, ramp: Ramp | None, tell: Callable[[Finding], None], say: Callable[[str], None]
    ) -> None:
        self._hp, self._ramp, self._tell, self._say = hp, ramp, tell, say
        self._rates: list[LearningRateSetter] = []
        self._own = False

    def build(
        self, module: Any, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], epochs: int | None
    ) -> None:
        """Takes the optimizers that the module has built. `epochs`: the full epochs of the run, if known.

        Raises:
            UserCodeError: a scheduler would raise in the middle of the run.
        """
        # Lightning has one without groups for a module without optimizers.
        optimizers = [optimizer for optimizer in optimizers if optimizer.param_groups]
        self._own = bool(schedulers) or overrides(module, "optimizer_step")
        self._rates = [
            LearningRateSetter(optimizer, self._hp, self._ramp, own=self._own, tell=self._tell, say=self._say)
            for optimizer in optimizers
        ]
        # With manual optimization the module steps its schedulers itself.
        stepped = schedulers if module.automatic_optimization else ()
        scheduled = [
            SteppedScheduler(
                config.scheduler,
                config.interval,
                config.frequency,
                config.monitor if config.reduce_on_plateau else None,
            )
            for config in stepped
        ]
        for text in (*self._unused(optimizers), *find_differences(scheduled, self._hp.train_steps, epochs)):
            self._tell(Finding("Recipe", 0, text))

    def set(self, step: int) -> None:
        """Sets the rates of step `step`, counted from 0."""
        for rates in self._rates:
            rates.set(step)

    @property
    def current(self) -> float:
        return self._rates[0].current if self._rates else 0.0

    def rate_after(self, steps: int) -> float:
        """Returns the rate of the first optimizer after `steps` steps; 0 without one."""
        return self._rates[0].rate_after(steps) if self._rates else 0.0

    def state(self) -> list[Mapping[str, Any]]:
        return [rates.state() for rates in self._rates]

    def keep_over(self, load: Callable[[], None], optimizers: Sequence[Optimizer], kept: Sequence[Any]) -> None:
        """Loads the optimizers' state with `load`, without its rates, which are those of the checkpoint's last step."""
        built = [[group.get("lr") for group in optimizer.param_groups] for optimizer in optimizers]
        load()
        if self._own:
            return
        for optimizer, before in zip(optimizers, built, strict=True):
            for group, rate in zip(optimizer.param_groups, before, strict=False):
                group["lr"] = rate
        for rates, state in zip(self._rates, kept, strict=False):
            rates.load(state)

    def rewind(self, kept: Sequence[Any]) -> None:
        """Loads the rates `kept` in a file of this run, after the optimizers' state in it."""
        if not self._own:
            for rates, state in zip(self._rates, kept, strict=False):
                rates.rewind(state)

    def _unused(self, optimizers: Sequence[Optimizer]) -> Iterator[str]:
        if self._own:
            yield from find_unused_schedule(self._hp)
        # Each of several may have its own values.
        if len(optimizers) == 1:
            yield from find_unused_by(optimizers[0], self._hp)
