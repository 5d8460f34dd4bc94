"""Parameters that a loss uses and the model does not have are told of: nothing trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.gang_processes import Launcher, run_spec
from tests.trainer.loop.test_what_is_trained import Net, examples
from tests.trainer.whole_runs import run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.task.task import Hyperparameters

Loss = Callable[[nn.Module, Any], Tensor]


class Centres(nn.Module):
    """As the losses of metric learning have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores @ self.weight, labels)


def in_a_closure() -> Loss:
    criterion = Centres()
    return lambda model, batch: criterion(model(batch[0]), batch[1])


def a_temperature() -> Loss:
    scale = torch.ones((), requires_grad=True)
    return lambda model, batch: nn.functional.cross_entropy(model(batch[0]) * scale, batch[1])


def a_penalty() -> Loss:
    """Needs the gradient with respect to the batch, whose tensors are new in every step."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        features = batch[0].detach().clone().requires_grad_()
        scores = model(features)
        (slope,) = torch.autograd.grad(scores.sum(), features, create_graph=True)
        return nn.functional.cross_entropy(scores, batch[1]) + slope.square().mean()

    return loss


def warnings(loss: Loss, make: Callable[[], nn.Module] = Net, **spec: Any) -> list[str]:
    ran = run(lambda hp, rank: Task(make(), examples(), loss), **{"trainSteps": 4, **spec})
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    return [text for text in ran.warnings if "not in the task's model" in text]


@pytest.mark.parametrize("spec", [{}, {"batch": {"global": 16, "perReplica": 4, "accumulation": 4}}])
def test_a_parameter_of_the_loss_outside_of_the_model_is_named_once(spec: dict[str, Any]) -> None:
    (text,) = warnings(in_a_closure(), **spec)
    assert "of shape [3, 3], used by Mm" in text
    assert "model.criterion = criterion" in text


def test_a_tensor_that_every_step_uses_again_is_one_too() -> None:
    (text,) = warnings(a_temperature())
    assert "of shape []" in text


def test_a_batch_whose_gradient_is_needed_is_none() -> None:
    assert warnings(a_penalty()) == []


def test_parameters_in_the_model_are_none_whether_they_are_trained_or_not() -> None:
    class Whole(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = Centres()
            self.back.requires_grad_(False)

    assert warnings(lambda model, batch: model.criterion(model(batch[0]), batch[1]), Whole) == []


def test_on_another_device_it_ends_the_run_with_the_remedy(launcher: Launcher) -> None:
    gang = launcher.start(run_spec(backend="xla", replicas=1, entrypoint="tests.trainer.task.test_outside:on_the_host"))
    assert gang.wait() == [ExitCode.UserError], gang.output()
    assert "model.criterion = criterion" in gang.hosts[0].message()["message"]


def on_the_host(hp: Hyperparameters) -> Task:
    return Task(Net(), examples(), in_a_closure())
