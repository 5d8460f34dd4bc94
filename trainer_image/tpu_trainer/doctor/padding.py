"""How much of the matrix products is padding.

A TPU holds a float32 matrix in tiles of 8 x 128, and its matrix unit is 128 wide (256 from v6e on), so sizes are
rounded up: rows to 8, features to 128 (Cloud TPU performance guide: batch a multiple of 8, features of 128).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tpu_trainer.gang.backends.base import tensors_of

ROWS, FEATURES = 8, 128

LEAST_WASTE = 0.1
LEAST_WEIGHTS = 1_000_000
"""Products of fewer weights take microseconds, padding included: no step waits for them."""

_MOST_NAMED = 3


@dataclass(frozen=True)
class Product:
    """A weight of shape [outputs, inputs] that activations are multiplied with."""

    name: str
    outputs: int
    inputs: int

    @property
    def useful(self) -> int:
        return self.outputs * self.inputs

    @property
    def shape(self) -> list[int]:
        return [self.outputs, self.inputs]

    @property
    def computed(self) -> list[int]:
        return [_up(size, FEATURES) for size in self.shape]

    @property
    def padded(self) -> int:
        return math.prod(self.computed)


def products_of(model: nn.Module) -> list[Product]:
    """Returns the matrices of all modules except lookup tables; a shared one once.

    Convolutions are left out: XLA chooses their layout, with batch or features along the wide side.
    """
    products: dict[int, Product] = {}
    for at, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            for name, weight in module.named_parameters(at, recurse=False):
                if weight.dim() == 2:
                    products[id(weight)] = Product(name, *weight.shape)
    return list(products.values())


def rows_of(batch: Any, per_replica: int) -> int:
    """Returns the rows that a replica multiplies at once: its examples times the positions of each.

    Taken from the largest tensor of the batch: [examples, features], or [examples, positions, ...] if it has more than
    two dimensions or holds integers.
    """
    largest = max(tensors_of(batch), key=Tensor.numel, default=None)
    if largest is None or largest.dim() < 2:
        return per_replica
    positions = largest.shape[1:] if not largest.is_floating_point() else largest.shape[1:-1]
    return per_replica * math.prod(positions)


def padding_advice(products: Sequence[Product], rows: int, per_replica: int) -> str | None:
    """Advises which sizes to change; None if less than a tenth of the matrix products' work is padding.

    All products are taken to have the same rows, so each counts with the size of its weight.
    """
    useful = sum(product.useful for product in products)
    padded = sum(product.padded for product in products)
    if useful < LEAST_WEIGHTS:
        return None
    waste = 1 - useful * rows / (padded * _up(rows, ROWS))
    if waste < LEAST_WASTE:
        return None
    advice = []
    if rows % ROWS:
        advice.append(
            f"{per_replica} examples per replica are computed as {_up(rows, ROWS)} rows: make the batch per replica a "
            f"multiple of {ROWS} (best of {FEATURES})"
        )
    worst = sorted(products, key=lambda product: product.useful - product.padded)[:_MOST_NAMED]
    descriptions = [
        f"{product.name} {product.shape} is computed as {product.computed}"
        for product in worst
        if product.padded > product.useful
    ]
    if descriptions:
        advice.append(f"{'; '.join(descriptions)}: make features multiples of {FEATURES}")
    return f"on TPU about {waste:.0%} of the matrix products' work is padding. {'. '.join(advice)}"


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
