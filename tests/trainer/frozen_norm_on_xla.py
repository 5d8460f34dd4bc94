"""Prints how far frozen batch norms are from PyTorch's on a CPU, in what they return and in the gradients.

Run by `test_backends`.
"""

from __future__ import annotations

import torch
import torch_xla
from torch import Tensor, nn

from tpu_trainer.backends.frozen_norm import mend_frozen_norms


def computed(kind: type[nn.Module], shape: list[int], affine: bool, device: torch.device) -> list[Tensor]:
    """What a norm returns, and the gradients of its input and its parameters."""
    torch.manual_seed(0)
    norm = kind(shape[1], affine=affine)
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    given = torch.randn(shape)
    norm, given = norm.to(device).eval(), given.to(device).requires_grad_()
    returned = norm(given)
    (returned * torch.arange(returned.numel(), device=device).reshape(shape)).sum().backward()
    torch_xla.sync()
    return [tensor.detach().cpu() for tensor in (returned, given.grad, *(each.grad for each in norm.parameters()))]


def distance() -> float:
    kinds = [(nn.BatchNorm1d, [6, 5]), (nn.BatchNorm1d, [6, 5, 4]), (nn.BatchNorm2d, [6, 5, 4, 3])]
    pairs = [
        (one, other)
        for kind, shape in kinds
        for affine in (True, False)
        for one, other in zip(
            computed(kind, shape, affine, torch_xla.device()),
            computed(kind, shape, affine, torch.device("cpu")),
            strict=True,
        )
    ]
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


if __name__ == "__main__":
    mend_frozen_norms()
    print("distance:", distance())
