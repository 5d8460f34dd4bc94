"""The trainer measures the gradient noise scale that the operator reads, and plain PyTorch computes."""

from pathlib import Path

import pytest
import torch
from examples import digits
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.trainer import in_process, plain
from tests.trainer.gang_processes import run_spec
from tpu_contract.noise_scale import Window, estimate
from tpu_training_operator.cli.run.measure_noise import read_noise

STEPS, RATE = 300, 0.05


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def exact(model: nn.Module) -> Window:
    """From the gradient of every example of the data."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, (image[None],)), label[None])

    of_each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *digits.split()[0].tensors)
    rows = torch.cat([gradients.flatten(1) for gradients in of_each.values()], 1)
    return Window(1, float(rows.var(0).sum()), float(rows.mean(0).square().sum()))


def test_one_replica_measures_what_the_gradients_of_all_examples_give(tmp_path: Path) -> None:
    truth = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step % 30 == 15:
            truth.append(exact(model))

    _, losses = plain.trained(
        network,
        digits.split()[0],
        digits.loss,
        lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
        steps=STEPS,
        before=look,
    )
    document = run_spec(
        entrypoint="examples.digits:task",
        trainSteps=STEPS,
        endAfterSteps=STEPS,
        warmupSteps=0,
        seed=plain.SEED,
        report={"gradientNoiseScale": True},
    ) | {"optimizer": {"name": "sgd", "learningRate": str(RATE)}}
    run = in_process.run(document, tmp_path)
    assert run.losses == pytest.approx(losses, abs=1e-4), "not the same training"
    measured = read_noise((tmp_path / "reports" / "history.json").read_bytes())
    expected = estimate(truth, plain.BATCH)
    assert measured is not None
    assert expected is not None
    assert abs(measured.whole.value - expected.value) < 4 * measured.whole.error
    assert measured.whole.error < expected.value / 2
    # A rung of the same steps tells the operator the same number.
    assert run.outcome.rung is not None
    assert run.outcome.rung["noiseScale"] == measured.whole.value
