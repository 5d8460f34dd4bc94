"""Tasks whose steps are compiled for a TPU, but never run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tpu_trainer import Hyperparameters, Task


class Zeros(Dataset[tuple[Tensor, Tensor]]):
    """As many examples as anyone asks for, which take no memory."""

    def __init__(self, width: int, length: int = 1 << 20) -> None:
        self._width, self._length = width, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(self._width), torch.zeros(self._width)


def deep(hp: Hyperparameters, width: int, layers: int) -> Task:
    """`layers` square layers, each followed by a ReLU: so large that memory shows, and quickly compiled."""
    model = nn.Sequential(*(part for _ in range(layers) for part in (_Square(width), nn.ReLU())))
    return Task(model=model, train=Zeros(width), loss=_distance)


def of_all_kinds(hp: Hyperparameters) -> Task:
    """A parameter of each type of number that gradients have."""
    return Task(model=_OfAllKinds(), train=Zeros(4), loss=_distance)


def _distance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


class _Square(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def reset_parameters(self) -> None:
        """Leaves the weights as they are: filling so many with random numbers takes longer than all the rest."""


class _OfAllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.as_float = nn.Parameter(torch.ones(4))
        self.as_double = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.as_bfloat16 = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.as_complex = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_real(self.as_complex)
        return inputs * self.as_float * self.as_double * self.as_bfloat16 * pairs[:, 0] * pairs[:, 1] + self.empty.sum()


def small(hp: Hyperparameters, width: int = 256, layers: int = 3) -> Task:
    """The layers of `deep`, between inputs and outputs of 8 numbers: activations of megabytes, inputs of bytes."""
    inner = (part for _ in range(layers) for part in (_Square(width), nn.ReLU()))
    return Task(model=nn.Sequential(nn.Linear(8, width), *inner, nn.Linear(width, 8)), train=Zeros(8), loss=_distance)


def steps_with(hp: Hyperparameters, what: str) -> Task:
    """A loss that does one thing more with the outputs."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs, targets = model(batch[0]), batch[1]
        THINGS[what](outputs, targets)
        return (outputs - targets).square().mean()

    return Task(model=nn.Linear(8, 8), train=Zeros(8), loss=loss)


def _solve(outputs: Tensor, targets: Tensor) -> None:
    torch.linalg.lstsq(outputs, targets)  # solve


def _count(outputs: Tensor, targets: Tensor) -> None:
    torch.histc(outputs.detach(), 10)  # count


THINGS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda outputs, _: outputs.sum().item(),  # item
    "cpu": lambda outputs, _: outputs.detach().cpu(),  # cpu
    "numpy": lambda outputs, _: outputs.detach().cpu().numpy(),  # numpy
    "tolist": lambda outputs, _: outputs.tolist(),  # tolist
    "print": lambda outputs, _: print(outputs),  # print
    "copy": lambda outputs, _: torch.empty(8, 8).copy_(outputs.detach()),  # copy
    "mask": lambda outputs, _: outputs[outputs > 0],  # mask
    "unique": lambda outputs, _: torch.unique(outputs),  # unique
    "solve": _solve,
    "count": _count,
    "columns": lambda outputs, _: outputs[:, torch.tensor([1, 0])],
    "pick": lambda outputs, targets: outputs[torch.arange(8, device=outputs.device), targets[:, 0].long()],
}
"""Each marked with its own name, unless it is fine."""


class _WithoutDevice(Tensor):
    @property
    def device(self) -> torch.device:
        raise LookupError("this one has no device")


def _lost() -> Tensor:
    """Returns what is left of a tensor that its owner has let go, as a transfer that has ended does."""
    source = torch.ones(1)
    source.is_wanted = True  # type: ignore[attr-defined]
    owner = source * torch.ones(1, requires_grad=True)
    del source
    (lost,) = (found for found in gc.get_objects() if type(found) is Tensor and hasattr(found, "is_wanted"))
    del owner
    return lost


_KEPT: dict[str, Callable[[], Tensor | None]] = {
    "nothing": lambda: None,
    "lost": _lost,
    "strange": lambda: torch.ones(1).as_subclass(_WithoutDevice),
}


def keeps(hp: Hyperparameters, what: str) -> Task:
    """A step that holds a tensor beside those of the task."""
    kept = [_KEPT[what]()]
    return Task(model=nn.Linear(8, 8), train=Zeros(8), loss=lambda model, batch: kept and _distance(model, batch))


class _Layers(nn.Module):
    def __init__(self, *, scanned: bool) -> None:
        super().__init__()
        self.scanned, self.layers = scanned, nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scanned:
            from torch_xla.experimental.scan_layers import scan_layers

            scanned: Tensor = scan_layers(self.layers, inputs)
            return scanned
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def repeats(hp: Hyperparameters, how: str) -> Task:
    """The same six layers as a loop of the program, and one after the other."""
    return Task(model=_Layers(scanned=how == "scan"), train=Zeros(8), loss=_distance)


def grows(hp: Hyperparameters) -> Task:
    """Every batch is longer than the one before."""
    batches = count(1)

    def collate(examples: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.zeros(len(examples), next(batches), 8)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()  # grows

    return Task(model=nn.Linear(8, 8), train=Zeros(8), loss=loss, collate=collate)


def calls_a_kernel(hp: Hyperparameters) -> Task:
    """Doubles its outputs with a kernel in Pallas."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        import jax
        from jax.experimental import pallas as pl
        from torch_xla.experimental.custom_kernel import make_kernel_from_pallas

        def double(read: Any, written: Any) -> None:
            written[...] = read[...] * 2

        def doubled(array: Any) -> Any:
            return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype))(array)

        outputs = model(batch[0])
        kernel = make_kernel_from_pallas(doubled, lambda array: [(array.shape, array.dtype)])
        return (outputs + kernel(outputs.detach())).square().mean()

    return Task(model=nn.Linear(8, 128), train=Zeros(8), loss=loss)


def few(hp: Hyperparameters) -> Task:
    return Task(model=nn.Linear(8, 8), train=Zeros(8, 1000), loss=_distance)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixed, self.norm = nn.Embedding(32, 16), nn.Linear(16, 48), nn.LayerNorm(16)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        queries, keys, values = self.mixed(self.norm(hidden)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        logits: Tensor = self.head(hidden + self.drop(found.transpose(1, 2).flatten(2)))
        return logits


class _Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index, index + 9) % 32


def transformer(hp: Hyperparameters) -> Task:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Task(model=_Attention(), train=_Tokens(), loss=loss)


class _Places(nn.Module):
    """Looks up with `gather`, and resizes: what torch_xla makes in another way on a TPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.images = nn.Parameter(torch.ones(8, 64)), nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.table.gather(1, inputs.long().abs() % 64)
        images = self.images(found.reshape(-1, 1, 8, 8))
        sized = nn.functional.interpolate(images, scale_factor=2, mode="bilinear")
        return nn.functional.interpolate(sized, size=(4, 4), mode="nearest").mean((1, 2)).repeat(8, 2)


def places(hp: Hyperparameters) -> Task:
    return Task(model=_Places(), train=Zeros(8), loss=_distance)
