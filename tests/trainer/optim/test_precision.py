"""recipe.precision: what a model computes in, in training and evaluation, and what stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer import plain, tasks
from tests.trainer.gang_processes import Launcher, start_replicas
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.optim.precision import apply_precision

BAND = 0.03
"""bfloat16 has eight significant bits. The losses of these 24 steps fall from 1.1 to about 0.9."""

MOMENTUM = {"name": "sgd", "learningRate": "0.3", "momentum": "0.9", "weightDecay": "1e-4"}


class Seeing(nn.Module):
    """Notes the types that its forward pass gets and makes."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.seen = tasks.Network(), set[tuple[bool, torch.dtype, torch.dtype]]()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        made = self.network(x)
        self.seen.add((self.training, x.dtype, self.network.first(x).dtype))
        return made


def seeing(hp: Hyperparameters, rank: int) -> Task:
    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        features, labels = batch
        return {"accuracy": (model(features).argmax(-1) == labels).float()}

    return replace(tasks.small(hp), model=Seeing(), evaluation=tasks.examples(), metrics=metrics)


def trained(precision: str, replicas: int = 2, **changes: Any) -> Ran:
    recipe = {"trainSteps": 24, "warmupSteps": 5, "recipe": MOMENTUM, "precision": precision}
    ran = run(seeing, replicas, **{**recipe, **changes})
    assert ran.outcome.code is ExitCode.Succeeded
    return ran


SINGLE, HALF = torch.float32, torch.bfloat16

TYPES = {
    # Of a batch, of a product, and of weights and optimizer state.
    "Float32": (SINGLE, SINGLE, SINGLE),
    "BFloat16Mixed": (SINGLE, HALF, SINGLE),
    "BFloat16": (HALF, HALF, HALF),
}


@pytest.mark.parametrize("precision", TYPES)
def test_training_and_evaluation_compute_in_the_same_types(precision: str, tmp_path: Path) -> None:
    ran = trained(precision, checkpoint={"uri": str(tmp_path), "keep": 1})
    batch, product, kept = TYPES[precision]
    assert ran.models[0].seen == {(True, batch, product), (False, batch, product)}
    weights, state = (
        {tensor.dtype for tensor in load_file(next(tmp_path.rglob(f"{name}.safetensors"))).values()}
        for name in ("model", "optimizer")
    )
    assert (weights, state) == ({kept, torch.int64}, {kept})
    ran.assert_replicas_equal()


@pytest.mark.parametrize("replicas", [1, 4])
def test_mixed_losses_stay_close_to_float32(replicas: int) -> None:
    expected, mixed = trained("Float32", replicas).losses, trained("BFloat16Mixed", replicas).losses
    assert mixed == pytest.approx(expected, abs=BAND)
    assert mixed != expected


@pytest.mark.parametrize("kind", ["xla", "xla-spmd", "chips"])
def test_mixed_losses_stay_close_to_float32_on_xla(launcher: Launcher, kind: str) -> None:
    gang = start_replicas(launcher, kind, 2, precision="BFloat16Mixed", gradientClipNorm="1e9")
    assert set(gang.wait()) == {0}, gang.output()
    expected = plain.small("sgd")
    assert gang.losses() == pytest.approx(expected, abs=BAND)
    assert max(abs(a - b) for a, b in zip(gang.losses(), expected, strict=True)) > 1e-5


def test_only_float32_becomes_bfloat16_and_shared_weights_stay_shared() -> None:
    model = tasks.Network()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.exact = nn.Parameter(torch.ones(2, dtype=torch.float64))
    task = Task(model=model, train=TensorDataset(torch.zeros(4, 8)), loss=tasks.loss)
    halved = apply_precision(task, "BFloat16", torch.device("cpu")).model
    assert (halved.phase.dtype, halved.exact.dtype) == (torch.complex64, torch.float64)
    assert halved.head.weight.dtype == halved.mask.dtype == torch.bfloat16
    assert halved.first.weight is halved.second.weight


class Scaled(nn.Module):
    """The gradient of its weight is the mean of the features, and after one step with rate 1 so is the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, x: Tensor) -> Tensor:
        return -(x * self.weight).sum(-1).mean()


def scaled(hp: Hyperparameters) -> Task:
    features = torch.rand(64, 256, generator=torch.Generator().manual_seed(5)) + 0.5
    build = lambda parameters, hp: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    train, loss = TensorDataset(features), lambda model, batch: model(batch[0])
    return Task(model=Scaled(), train=train, loss=loss, optimizer=build)


CROSSED = {"sharding": "Optimizer", "onNotFinite": "Skip", "gradientClipNorm": "1e9", "emaDecay": "0.5"}


@pytest.mark.parametrize(
    ("kind", "replicas", "changes"),
    [("torch", 1, {}), ("torch", 2, CROSSED), ("xla", 2, CROSSED), ("chips", 2, {}), ("xla-spmd", 2, {})],
    ids=["torch", "torch, crossed", "xla, crossed", "chips", "xla-spmd"],
)
def test_bfloat16_gradients_of_many_passes_are_summed_in_float32(
    launcher: Launcher, tmp_path: Path, kind: str, replicas: int, changes: dict[str, Any]
) -> None:
    spec = {"entrypoint": "tests.trainer.optim.test_precision:scaled", "precision": "BFloat16", **changes}
    steps = {"trainSteps": 1, "warmupSteps": 0, "checkpoint": {"uri": str(tmp_path / "kept"), "keep": 1}}
    passes = {"global": 64, "perReplica": 1, "accumulation": 64 // replicas}
    gang = start_replicas(launcher, kind, replicas, batch=passes, **spec, **steps)
    assert set(gang.wait()) == {0}, gang.output()
    (weights,) = (tmp_path / "kept").rglob("model.safetensors")
    expected = scaled(None).train.tensors[0].bfloat16().double().mean(0)
    found = load_file(weights)["weight"].double()
    # One rounding to bfloat16's eight bits, of the sum; the partitioner rounds in every pass, too.
    limit = 2**-7 if kind == "xla-spmd" else 2**-8
    assert ((found - expected).abs() / expected).max().item() < limit
