"""Arithmetic in place, traced the quick way and torch's own; prints where the two are not the same program.

Run by `test_in_place`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor

from tpu_trainer.optim.in_place import call_in_place

Call = tuple[Callable[..., Any], Callable[[Sequence[Tensor]], tuple[Any, ...]], dict[str, Any]]

SAME: Sequence[Call] = (
    (Tensor.add_, lambda three: (three[0], three[1]), {"alpha": -0.25}),
    (Tensor.add_, lambda three: (three[0], 1e-8), {}),
    (Tensor.sub_, lambda three: (three[0], three[1]), {}),
    (Tensor.mul_, lambda three: (three[0], 0.999), {}),
    (Tensor.mul_, lambda three: (three[0], three[1].double()), {}),
    (Tensor.div_, lambda three: (three[0], three[1]), {}),
    (Tensor.lerp_, lambda three: (three[0], three[1], 0.125), {}),
    (Tensor.lerp_, lambda three: (three[0], three[1], three[2]), {}),
    (Tensor.addcmul_, lambda three: (three[0], three[1], three[2]), {"value": -0.5}),
    (Tensor.addcdiv_, lambda three: (three[0], three[1], three[2]), {"value": -0.5}),
    (Tensor.addcdiv_, lambda three: (three[0].t(), three[1].t(), three[2].t()), {}),
)

# A result that is larger than its tensor, and weights that autograd still watches.
REFUSED: Sequence[Callable[[Sequence[Tensor]], tuple[Any, ...]]] = (
    lambda three: (three[0][0], three[1]),
    lambda three: (three[0].requires_grad_(), 0.5),
)


def tensors(kind: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(30, 20).to(kind).to(torch_xla.device()) for _ in range(3)]
    torch_xla.sync()
    return made


def program(call: Call, kind: torch.dtype, quick: bool) -> bytes:
    """The hash of the program that one call leaves behind."""
    function, arguments, named = call
    three = tensors(kind)
    args = arguments(three)
    returned = call_in_place(function, args, named) if quick else function(*args, **named)
    assert returned is args[0]
    found: bytes = torch_xla._XLAC._get_graph_hash([three[0]])
    return found


def different() -> list[str]:
    return [
        f"{call[0].__name__} in {kind}"
        for call in SAME
        for kind in (torch.float32, torch.bfloat16)
        if program(call, kind, quick=True) != program(call, kind, quick=False)
    ]


def accepted() -> list[int]:
    """The places in REFUSED of those that are not."""
    found = []
    for place, arguments in enumerate(REFUSED):
        try:
            call_in_place(Tensor.mul_, arguments(tensors()), {})
        except RuntimeError:
            continue
        found.append(place)
    return found


if __name__ == "__main__":
    print("different:", different(), "accepted:", accepted())
