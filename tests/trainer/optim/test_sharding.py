"""recipe.sharding: Optimizer. The run is the one with whole optimizers (tests/trainer/crossings, too), in a fraction of
their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, start_replicas
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.optim.sharding import SMALLEST, divides
from tpu_trainer.optim.update import tensors_in

CLOSE = 1e-5
ADAMW = {"name": "adamw", "learningRate": "0.02", "weightDecay": "1e-4"}
"""That of `gang.run_spec`."""
ENTRYPOINT = "tests.trainer.optim.test_sharding:wide"


class Wide(nn.Module):
    """Parameters that are divided, with a remainder on two replicas and more; and some that are too small to be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 201)
        self.second = nn.Linear(201, 37)
        self.head = nn.Linear(37, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return output


def wide(hp: Hyperparameters) -> Task:
    return Task(model=Wide(), train=tasks.examples(), loss=tasks.loss)


def made(hp: Hyperparameters, rank: int) -> Task:
    return wide(hp)


def trained(replicas: int, sharding: str, **changes: Any) -> Ran:
    ran = run(made, replicas, **{"recipe": ADAMW, "trainSteps": 24, "warmupSteps": 5, "sharding": sharding, **changes})
    assert ran.outcome.ended_well, ran.outcome
    return ran


def test_replicas_may_hold_their_parameters_in_any_order() -> None:
    def shuffled(hp: Hyperparameters, rank: int) -> Task:
        def build(parameters: Any, hp: Hyperparameters) -> Optimizer:
            ordered = list(parameters)
            return torch.optim.AdamW(ordered[rank:] + ordered[:rank], lr=0.02, weight_decay=1e-4)

        return replace(wide(hp), optimizer=build)

    ran = run(shuffled, 4, recipe=ADAMW, trainSteps=24, sharding="Optimizer")
    assert ran.outcome.ended_well
    ran.assert_replicas_equal()
    assert ran.losses == pytest.approx(trained(4, "Replicated", warmupSteps=0).losses, abs=CLOSE)


@pytest.mark.parametrize("kind", ["torch", "xla", "chips"])
def test_every_backend_divides_alike(launcher: Launcher, kind: str) -> None:
    expected = trained(1, "Replicated", warmupSteps=2, trainSteps=24, seed=3).losses
    spec = {"optimizer": "adamw", "trainSteps": 24, "warmupSteps": 2, "entrypoint": ENTRYPOINT}
    gang = start_replicas(launcher, kind, 2, sharding="Optimizer", **spec)
    assert set(gang.wait()) == {0}, gang.output()
    assert gang.losses() == pytest.approx(expected, abs=CLOSE)
    # The programs that gather the parts are not blamed on the task.
    assert gang.warnings() == {}


@pytest.mark.parametrize("replicas", [2, 8])
def test_each_replica_holds_its_share_of_the_state(replicas: int) -> None:
    held: dict[int, Optimizer] = {}

    def noted(hp: Hyperparameters, rank: int) -> Task:
        def build(parameters: Any, hp: Hyperparameters) -> Optimizer:
            held[rank] = torch.optim.AdamW(parameters, lr=hp.learning_rate)
            return held[rank]

        return replace(wide(hp), optimizer=build)

    assert run(noted, replicas, recipe=ADAMW, trainSteps=2, sharding="Optimizer").outcome.ended_well
    for optimizer in held.values():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            moments = [tensor.numel() for tensor in tensors_in(optimizer.state[parameter]) if tensor.dim()]
            expected = -(-parameter.numel() // replicas) if divides(parameter) else parameter.numel()
            assert moments == [expected, expected]
        assert sum(map(divides, parameters)) == 2
    assert SMALLEST > 201


SLICES = [(4, "Optimizer"), (2, "Optimizer"), (8, "Optimizer"), (2, "Replicated"), (4, "Optimizer")]


def test_a_run_moves_over_slices_and_back_to_whole_optimizers(tmp_path: Path) -> None:
    losses = []
    for number, (replicas, sharding) in enumerate(SLICES, start=1):
        checkpoint = {"uri": str(tmp_path), "everySteps": 6, "keep": 1}
        losses += trained(replicas, sharding, trainSteps=6 * number, warmupSteps=2, checkpoint=checkpoint).losses
    assert losses == pytest.approx(trained(1, "Replicated", trainSteps=30, warmupSteps=2).losses, abs=CLOSE)
    # What is stored is whole.
    (stored,) = tmp_path.glob("*/optimizer.safetensors")
    shapes = [tuple(tensor.shape) for tensor in safetensors.torch.load_file(stored).values()]
    assert sorted(shape for shape in shapes if len(shape) == 2) == [(3, 37)] * 2 + [(37, 201)] * 2 + [(201, 8)] * 2


class ByNorm(Optimizer):
    """Scales a parameter's step by the parameter's norm, as LARS and LAMB do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * float(parameter.norm()))


@pytest.mark.parametrize("build", [ByNorm, torch.optim.Adafactor], ids=lambda build: build.__name__)
def test_an_optimizer_that_needs_whole_parameters_is_refused(build: Any) -> None:
    def task(hp: Hyperparameters, rank: int) -> Task:
        return replace(wide(hp), optimizer=lambda given, hp: build(given, lr=0.1))

    outcome = run(task, 2, sharding="Optimizer").outcome
    assert outcome.code is ExitCode.UserError
    assert f"; {build.__name__} does not" in outcome.message


def test_every_kind_of_parameter_group_is_tried() -> None:
    class Mixed(ByNorm):
        """Plain in its first group, by the norm in its second."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    scale = float(parameter.norm()) if group["by_norm"] else 1.0
                    parameter.sub_(parameter.grad, alpha=group["lr"] * scale)

    def build(parameters: Any, hp: Hyperparameters) -> Optimizer:
        first, *others = parameters
        return Mixed([{"params": [first], "by_norm": False}, {"params": others, "by_norm": True}], lr=0.1)

    outcome = run(lambda hp, rank: replace(wide(hp), optimizer=build), 2, sharding="Optimizer").outcome
    assert outcome.code is ExitCode.UserError
    assert "Mixed does not" in outcome.message
