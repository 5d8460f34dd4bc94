"""What happens to a run whose loss, gradients or weights are not finite, as recipe.onNotFinite says.

Decided when the signals are read, and when the parameters are compared. All replicas do both after the same steps, so
they all end alike.
"""

from __future__ import annotations

import math
from itertools import count

from tpu_trainer.doctor.findings import Check, Voice
from tpu_trainer.errors import NotFiniteError
from tpu_trainer.exchange import Reading
from tpu_trainer.spec import OnNotFinite

MOST_SKIPPED = 100
"""Steps skipped in a row before the run ends: it no longer learns anything."""

_ADVICE = (
    "lower the learning rate or lengthen the warm-up; clip the gradients; look for a division by zero, the logarithm "
    "of zero, an overflow of float16, or examples that are not finite themselves"
)


class Finiteness:
    """`clean`: no update behind the present parameters had a loss or gradients that were not finite, or made such
    weights. A checkpoint records it, and the run that continues from it starts with it. `bad`: steps that were not
    finite, skipped ones included."""

    def __init__(self, policy: OnNotFinite, voice: Voice, steps: int, clean: bool = True) -> None:
        """`steps`: of the whole run."""
        self._policy, self._voice = policy, voice
        self._most = min(MOST_SKIPPED, steps)
        self.clean = clean
        self.bad = 0
        self._first: int | None = None
        self._bad_weights: int | None = None
        self._in_a_row = 0

    def read(self, first: int, reading: Reading, learning_rate: float) -> None:
        """`first`: the step of the reading's first loss.

        Raises:
            NotFiniteError: in all replicas alike, if the run must not go on.
        """
        for step, loss, finite in zip(count(first), reading.losses, reading.finite, strict=False):
            if finite:
                self._in_a_row = 0
                continue
            self.bad, self._in_a_row = self.bad + 1, self._in_a_row + 1
            self._first = step if self._first is None else self._first
            what = "the gradients are not finite (loss {:.6g})" if math.isfinite(loss) else "the loss is {}"
            self._judge(step, what.format(loss), learning_rate)

    def weights(self, step: int, what: str) -> None:
        """After `step` weights are not finite; `what` says which. Skipping a step cannot repair them.

        Raises:
            NotFiniteError: unless the recipe says to go on.
        """
        text = (
            f"{what}, although loss and gradients were: the update did it. What helps: parameters in float32 or "
            "bfloat16 instead of float16, in which the epsilon of Adam is zero; a lower learning rate"
        )
        if self._policy is not OnNotFinite.WARN:
            raise NotFiniteError(f"{text}. No checkpoint holds that step", step)
        self._bad_weights = step if self._bad_weights is None else self._bad_weights
        # If it is not clean, the reason has been told already.
        if self.clean:
            self.clean = False
            text = f"{text}. recipe.onNotFinite is Warn, so the run goes on"
            self._voice.say(Check.NOT_FINITE, step, text, cause="weights")

    @property
    def summary(self) -> str:
        """What the run's last line adds; nothing if all was finite."""
        weights = "" if self._bad_weights is None else f"after step {self._bad_weights}"
        if not self.bad:
            return weights and f"; WARNING: the weights were not finite {weights}"
        steps = "1 step" if self.bad == 1 else f"{self.bad} steps"
        if self._policy is OnNotFinite.SKIP:
            return f"; {steps} skipped, because loss or gradients were not finite"
        ending = weights and f", and the weights were not {weights}"
        return f"; WARNING: loss or gradients were not finite in {steps}, first in step {self._first}{ending}"

    def _judge(self, step: int, what: str, learning_rate: float) -> None:
        rate = f"learning rate {learning_rate:.6g}"
        if self._policy is OnNotFinite.STOP:
            raise NotFiniteError(
                f"{what} since step {step} ({rate}); no checkpoint holds that step. What helps: {_ADVICE}. With "
                "recipe.onNotFinite: Skip such steps change nothing, and the training goes on",
                step,
            )
        if self._policy is OnNotFinite.SKIP:
            if self._in_a_row == self._most:
                skipped = f"the last {self._most} steps were all skipped: {what} in step {step} ({rate})"
                raise NotFiniteError(f"{skipped}. What helps: {_ADVICE}", step)
            times = "" if self.bad == 1 else f", the {self.bad}th such step"
            text = f"step {step} was skipped: {what} ({rate}){times}"
        else:
            self.clean = False
            text = (
                f"{what} in step {step} ({rate}), and recipe.onNotFinite is Warn: the training goes on, most likely "
                f"with parameters that are not finite either. What helps: {_ADVICE}"
            )
        self._voice.say(Check.NOT_FINITE, step, text, severity=float(self.bad))
