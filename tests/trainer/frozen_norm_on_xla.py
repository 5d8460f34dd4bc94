"""Prints how far frozen norms are from PyTorch's on a CPU, in what they return and in the gradients.

Run by `test_backends`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_xla
from torch import Tensor, nn

# By its own name, as a task's module imports it: before the backend is made.
from torch.nn.functional import batch_norm

from tpu_trainer.gang.backends.torch_xla_repairs import repair_frozen_norms


class OwnNorm(nn.BatchNorm1d):
    """Calls torch's function itself."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's own name
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


NORMS: tuple[tuple[Callable[..., nn.Module], list[int]], ...] = (
    (nn.BatchNorm1d, [6, 5]),
    (nn.BatchNorm1d, [6, 5, 4]),
    (nn.BatchNorm2d, [6, 5, 4, 3]),
    (nn.SyncBatchNorm, [6, 5, 4]),
    (OwnNorm, [6, 5, 4]),
    (nn.InstanceNorm1d, [6, 5, 32]),
    (nn.InstanceNorm2d, [6, 5, 8, 6]),
    (nn.InstanceNorm2d, [5, 8, 6]),
)


def computed(
    kind: Callable[..., nn.Module], shape: list[int], affine: bool, device: torch.device, training: bool
) -> list[Tensor]:
    """Returns what a norm returns, and the gradients of its input and its parameters."""
    torch.manual_seed(0)
    norm = kind(5, affine=affine, track_running_stats=True)
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    given = torch.randn(shape)
    norm, given = norm.to(device).train(training), given.to(device).requires_grad_()
    returned = norm(given)
    (returned * torch.arange(returned.numel(), device=device).reshape(shape)).sum().backward()
    torch_xla.sync()
    return [tensor.detach().cpu() for tensor in (returned, given.grad, *(each.grad for each in norm.parameters()))]


def distance() -> float:
    pairs = [
        (one, other)
        for kind, shape in NORMS
        for affine in (True, False)
        for training in (True, False)
        for one, other in zip(
            computed(kind, shape, affine, torch_xla.device(), training),
            computed(kind, shape, affine, torch.device("cpu"), training),
            strict=True,
        )
    ]
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


if __name__ == "__main__":
    repair_frozen_norms()
    # A process may make more than one backend.
    repair_frozen_norms()
    print("distance:", distance())
