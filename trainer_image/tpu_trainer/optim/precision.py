"""recipe.precision: what the model computes in. Everything else of a step stays as it is.

Gradients are exchanged in float32 whatever their type: a sum in bfloat16 over hundreds of replicas loses what the small
ones add.
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


def in_precision(task: Task, precision: str, device: torch.device) -> Task:
    """The task as it computes in `precision`, one of `spec.PRECISIONS`; its model is changed in place.

    BFloat16Mixed: the loss, metrics and evaluations run under autocast; the backward pass follows the forward pass.
    BFloat16: float32 parameters and buffers become bfloat16, so the optimizer makes its state in bfloat16, too, and
    float32 tensors of a batch arrive in bfloat16. Other types stay what they are.
    """
    if precision == "BFloat16Mixed":
        # No cache of cast weights: replicas that are threads share it, and each empties it after its own forward
        # pass. Then a weight that is used twice is cast once or twice by chance, and replicas trace different programs.
        cast = partial(torch.autocast, device.type, dtype=torch.bfloat16, cache_enabled=False)
        return replace(
            task,
            loss=_Under(cast, task.loss),
            metrics=None if task.metrics is None else _Under(cast, task.metrics),
            evaluator=None if task.evaluator is None else _EvaluatorUnder(cast, task.evaluator),
        )
    if precision == "BFloat16":
        _halve(task.model)
        return replace(
            task,
            collate=_Halved(task.collate or default_collate),
            evaluation_collate=_Halved(task.evaluation_collate or task.collate or default_collate),
        )
    return task


@dataclass(frozen=True)
class _Under:
    """`function` under the context that `cast` makes."""

    cast: Callable[[], Any]
    function: Callable[[nn.Module, Batch], Any]

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        with self.cast():
            return self.function(model, batch)


@dataclass(frozen=True)
class _EvaluatorUnder:
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
class _Halved:
    """`collate`, with float32 tensors in bfloat16: half as much to send to the device.

    An object, because a loader's workers may get it pickled.
    """

    collate: Callable[[list[Any]], Batch]

    def __call__(self, examples: list[Any]) -> Batch:
        return map_tensors(_half, self.collate(examples))


def _half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def _halve(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        # In place, so that shared weights stay shared; not model.to(), which would turn complex weights into real ones.
        tensor.data = _half(tensor.data)
