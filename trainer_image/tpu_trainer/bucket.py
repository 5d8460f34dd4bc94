"""All that crosses between replicas in a step, as one bucket, so that a step costs one collective.

The bucket is the gradients in the model's order, then the signals, then, where replicas may differ in it, which
parameters have a gradient at all. `loop` sends it round; a backend makes it flat (`summed`) where its collective
needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tpu_trainer.errors import UserCodeError
from tpu_trainer.losses import Loss

if TYPE_CHECKING:
    from tpu_trainer.backends.base import Backend

LOSS, WEIGHT, STOP, SAVE, BROKEN, SQUARE = range(6)
"""The signals' places. Loss and weight: `Loss`. STOP, SAVE: a replica asks for the end, or for a checkpoint. BROKEN:
above 0 where a replica's own loss or gradients were not finite. SQUARE: of the replica's own gradient, only where the
noise scale is wanted."""

SIGNALS = 5
"""How many there are; one more with the noise scale."""


@dataclass(frozen=True)
class Wishes:
    """What this replica asks of all, as data on the device (Backend.flag): to stop, to save a checkpoint."""

    stop: Tensor
    save: Tensor


def exchange(
    parameters: Sequence[nn.Parameter], loss: Loss, wishes: Wishes, backend: Backend, squares: bool = False
) -> Tensor:
    """Makes every gradient that of the mean loss over all replicas; returns the summed signals, shape [5] or [6].

    A parameter without a gradient on any replica keeps none, as in plain PyTorch, where optimizers pass it over. One
    that only some replicas used gets the same gradient on all.

    No gradient outlives this call but on its parameter: one that is still referred to at a sync becomes an output of
    the compiled graph (1x the parameters in memory, a fifth of the speed of a small model).

    Raises:
        UserCodeError: a gradient is sparse.
    """
    alone = backend.terms == 1 or backend.one_program
    used = [parameter.grad is not None for parameter in parameters]
    sent = [parameter for parameter, has in zip(parameters, used, strict=True) if has or not alone]
    gradients, signals = take(sent, loss, wishes, squares)
    if not alone:
        signals = torch.cat([signals, backend.to_device(torch.tensor(used, dtype=signals.dtype))])
    sums, total = backend.reduce_bucket(gradients, signals)
    del gradients
    count = SIGNALS + squares
    anywhere = [True] * len(sent)
    # Where all have a gradient here, all have one somewhere: most models never wait for this reading.
    if not alone and not all(used):
        anywhere = [has > 0 for has in total[count:].tolist()]
    divisor: int | Tensor = backend.terms
    if loss.weight is not None:
        # Data on the device: as a number it would be compiled in.
        divisor = total[WEIGHT] if total.device == loss.total.device else backend.to_device(total[WEIGHT])
    give(sums, sent, divisor, anywhere)
    # A copy: a piece of the flat bucket would keep all of it alive until it is read.
    return total[:count].clone()


def take(
    parameters: Sequence[nn.Parameter], loss: Loss, wishes: Wishes, squares: bool = False
) -> tuple[list[Tensor], Tensor]:
    """This replica's gradients as they travel, taken off the parameters (zeros where there is none), and its signals.

    They travel as real numbers, in float32 or, where they are float64, in float64.
    """
    gradients = [_travelling(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    kind = torch.float64 if loss.total.dtype == torch.float64 else torch.float32
    total = loss.total.detach().to(kind).reshape(1)
    weight = torch.ones_like(total) if loss.weight is None else loss.weight.detach().to(kind).reshape(1)
    # A sum is finite where all its terms are, unless they are beyond anything that could still be trained.
    checked = torch.cat([total, weight, *(gradient.sum().to(kind).reshape(1) for gradient in gradients)])
    broken = 1 - torch.isfinite(checked).all().to(kind).reshape(1)
    asked = [wish.sum().to(kind).reshape(1) for wish in (wishes.stop, wishes.save)]
    signals = [total, weight, *asked, broken]
    if squares:
        own = square(gradients).to(kind).reshape(1)
        signals.append(own if loss.weight is None else own / weight.square())
    return gradients, torch.cat(signals)


def give(
    sums: Sequence[Tensor], parameters: Sequence[nn.Parameter], divisor: int | Tensor, anywhere: Sequence[bool]
) -> None:
    """Makes the summed gradients over `divisor` the parameters' own, where any replica had one."""
    for parameter, total, has in zip(parameters, sums, anywhere, strict=True):
        if has:
            mean = total if isinstance(divisor, int) and divisor == 1 else total / divisor
            parameter.grad = as_complex(mean, parameter).to(parameter.dtype)


def sound(signals: Tensor) -> Tensor:
    """Whether loss and gradients of the step are finite, from its summed signals: a boolean without dimensions."""
    return (signals[BROKEN] == 0) & torch.isfinite(signals[LOSS]) & (signals[WEIGHT] > 0)


def square(gradients: Sequence[Tensor]) -> Tensor:
    """The squared length of all gradients together; no dimensions."""
    if not gradients:
        return torch.zeros(())
    return torch.stack([as_real(gradient.detach()).float().square().sum() for gradient in gradients]).sum()


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, any other as it is: devices do not add up complex ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(real: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_real` for a tensor like `like`."""
    return torch.view_as_complex(real) if like.is_complex() else real


def summed(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The sums of the tensors, by one flat collective per dtype, of which most models have one."""
    sums = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        same = [tensors[place] for place in places]
        for place, piece in zip(places, unflatten(all_reduce(flatten(same)), same), strict=True):
            sums[place] = piece
    return sums


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with all the elements, in order; all of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: pieces of `flat` in the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _travelling(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.layout is not torch.strided:
        raise UserCodeError(
            f"the gradient of a parameter of shape {list(parameter.shape)} is sparse; replicas exchange dense ones "
            "only: make its layer without sparse=True"
        )
    real = as_real(gradient.detach())
    return real if real.dtype == torch.float64 else real.float()
