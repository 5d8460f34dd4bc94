"""torch_xla's scan, with which it runs nn.GRU, and which keeps the programs of a pass for the passes after it.

torch_xla 2.9 finds them by shapes alone. So what a pass without gradients has left, an evaluation or a step with a
frozen part below, would serve a later pass that needs the gradient of its input, and what is below would silently get
none. Here it finds them by which inputs need a gradient, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch.utils._pytree import tree_iter
from torch_xla.experimental import scan

_find = scan.value_and_grad_partitioned


def mend_scans() -> None:
    """Makes torch_xla's scan in this process find its programs by which inputs need a gradient, too."""
    scan.value_and_grad_partitioned = _find_by_need


def _find_by_need(
    fn: Any, init: Any, xs: Any, partition_fn: Any = scan.default_partition, is_fn_pure: Any = True
) -> Any:
    needs = tuple(leaf.requires_grad for leaf in tree_iter(xs))
    return _find(fn, init, xs, _variant(partition_fn, needs), is_fn_pure)


@cache
def _variant(partition_fn: Callable[..., Any], needs: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns the same function as another object, which is part of what torch_xla looks for."""
    return partial(partition_fn)
