"""recipe.precision: the types that the model computes in. The rest of a step stays as it is.

Gradients of any type are exchanged in float32: a sum in bfloat16 over hundreds of replicas loses small contributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tpu_trainer.gang.backends.base import map_tensors
from tpu_trainer.task.task import Batch, Evaluator, Task

if TYPE_CHECKING:
    from tpu_trainer.gang.backends.base import Backend


def apply_precision(task: Task, precision: str, device: torch.device) -> Task:
    """Returns the task, changed to compute in `precision`, a Precision; its model is changed in place.

    BFloat16Mixed: the loss, metrics and evaluations run under autocast; the backward pass follows the forward pass.
    BFloat16: float32 parameters and buffers become bfloat16, so the optimizer makes its state in bfloat16, too, and
    float32 tensors of a batch arrive in bfloat16. Other types stay what they are.
    """
    if precision == "BFloat16Mixed":
        # No cache of cast weights: replicas that are threads share it, and each empties it after its forward pass. A
        # weight that is used twice would be cast once or twice by chance, and replicas would trace different programs.
        cast = partial(torch.autocast, device.type, dtype=torch.bfloat16, cache_enabled=False)
        return replace(
            task,
            loss=_casting(cast, task.loss),
            metrics=None if task.metrics is None else _casting(cast, task.metrics),
            evaluator=None if task.evaluator is None else _CastEvaluator(cast, task.evaluator),
        )
    if precision == "BFloat16":
        _halve(task.model)
        return replace(
            task,
            collate=_HalvedCollate(task.collate or default_collate),
            evaluation_collate=_HalvedCollate(task.evaluation_collate or task.collate or default_collate),
        )
    return task


def _casting(cast: Callable[[], Any], function: Callable[[nn.Module, Batch], Any]) -> Callable[..., Any]:
    """Returns `function`, called in a context made by `cast`."""

    def call(model: nn.Module, batch: Batch) -> Any:
        with cast():
            return function(model, batch)

    return call


@dataclass(frozen=True)
class _CastEvaluator:
    cast: Callable[[], Any]
    evaluator: Evaluator

    def begins(self) -> None:
        self.evaluator.begins()

    def batch(self, batch: Batch, index: int, rows: int) -> None:
        with self.cast():
            self.evaluator.batch(batch, index, rows)

    def ends(self, backend: Backend) -> dict[str, float]:
        return self.evaluator.ends(backend)


@dataclass(frozen=True)
class _HalvedCollate:
    """Calls `collate` and converts float32 tensors to bfloat16, which halves the transfer to the device.

    An object, because a loader's workers may get it pickled.
    """

    collate: Callable[[list[Any]], Batch]

    def __call__(self, examples: list[Any]) -> Batch:
        return map_tensors(_half, self.collate(examples))


def _half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def _halve(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        # In place, so that shared weights stay shared; not model.to(), which would make complex weights real.
        tensor.data = _half(tensor.data)
