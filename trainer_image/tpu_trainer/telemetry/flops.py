"""Counts the model's floating point operations while a step runs or is traced. Entered by `utilisation`."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class CountFlops(TorchDispatchMode):
    """`with CountFlops() as counted:` around forward and backward; then `counted.flops`.

    Matrix products, convolutions and attention count, with 2 operations per multiplication and addition; what works
    element by element is left out, as in all published utilisations. What torch.utils.flop_counter knows is the
    measure, but not its FlopCounterMode: that takes composite operations apart, and the traced graph would be another
    than that of the later steps. Here every operation goes on as it came.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        return result
