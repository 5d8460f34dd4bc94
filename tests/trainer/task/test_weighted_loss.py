"""Losses that are means over unequal weights: class weights, tokens that do not count. One trajectory all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer import plain
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task

CLOSE = 1e-5
CLASSES = torch.tensor([0.2, 3.0, 1.0])
IGNORED = -100


def examples() -> TensorDataset:
    """Labels of sequences of 5; most labels do not count, and in some sequences none does."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 3, (72, 5), generator=generator)
    labels[torch.rand(72, 5, generator=generator) < 0.8] = IGNORED
    return TensorDataset(torch.randn(72, 5, 6, generator=generator), labels)


def parts(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    features, labels = batch
    logits = model(features).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), weight=CLASSES, reduction="sum", ignore_index=IGNORED)
    counted = torch.where(labels == IGNORED, 0.0, CLASSES[labels.clamp(min=0)])
    return total, counted.sum()


def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features, labels = batch
    logits = model(features).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), weight=CLASSES, ignore_index=IGNORED)


def test_a_weight_that_depends_on_the_model_is_refused() -> None:
    def gated(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(model(batch[0]).mean((1, 2)))
        return (gate * batch[0].mean((1, 2))).sum(), gate.sum()

    outcome = run(lambda hp, rank: Task(model=nn.Linear(6, 3), train=examples(), loss=gated), 2).outcome
    assert outcome.code is ExitCode.UserError
    assert outcome.message.startswith("the weight of the task's loss")
    assert "weight.detach()" in outcome.message


LAYOUTS = {
    "1 host": (1, {"global": 16, "perReplica": 16}),
    "2 hosts": (2, {"global": 16, "perReplica": 8}),
    "4 hosts": (4, {"global": 16, "perReplica": 4}),
    "16 hosts, some without a label": (16, {"global": 16, "perReplica": 1}),
    "1 host, accumulation 4": (1, {"global": 16, "perReplica": 4, "accumulation": 4}),
    "2 hosts, accumulation 4": (2, {"global": 16, "perReplica": 2, "accumulation": 4}),
}


@pytest.mark.parametrize(("replicas", "batch"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_weighted_loss_makes_the_steps_of_a_single_process(replicas: int, batch: dict[str, int]) -> None:
    def task(hp: Any, rank: int) -> Task:
        return Task(
            model=nn.Linear(6, 3),
            train=examples(),
            loss=parts,
            optimizer=lambda parameters, hp: torch.optim.AdamW(parameters, lr=0.05),
        )

    expected, losses = plain.trained(
        lambda: nn.Linear(6, 3), examples(), mean, lambda model: torch.optim.AdamW(model.parameters(), lr=0.05)
    )
    ran = run(task, replicas, batch=batch)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    ran.assert_replicas_equal()
    assert ran.losses == pytest.approx(losses, abs=CLOSE)
    assert plain.distance(ran.models[0], expected) < CLOSE


@pytest.mark.parametrize(
    ("kind", "weight"), [(torch.bool, 1), (torch.uint8, 200), (torch.int64, 200), (torch.float16, 20000)]
)
def test_weights_of_any_type_add_up_over_the_passes_of_a_step(kind: torch.dtype, weight: int) -> None:
    def trained(kind: torch.dtype) -> Ran:
        def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return model(batch[0]).square().mean() * weight, torch.tensor(weight, dtype=kind)

        task = lambda hp, rank: Task(model=nn.Linear(6, 3), train=examples(), loss=weighted)  # noqa: E731
        return run(task, 2, batch={"global": 16, "perReplica": 2, "accumulation": 4}, trainSteps=10)

    ran, expected = trained(kind), trained(torch.float32)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    assert ran.losses == pytest.approx(expected.losses, abs=CLOSE)
    assert plain.distance(ran.models[0], expected.models[0]) < CLOSE


def test_half_precision_sums_add_up_over_the_passes_of_a_step() -> None:
    def task(hp: Any, rank: int) -> Task:
        def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            # Each pass is within the range of float16, the step is not.
            return 0 * model(batch[0]).sum().half() + 20000, torch.tensor(1.0)

        return Task(model=nn.Linear(6, 3), train=examples(), loss=summed)

    ran = run(task, batch={"global": 16, "perReplica": 4, "accumulation": 4}, trainSteps=3)
    assert (ran.outcome.code, ran.losses) == (ExitCode.Succeeded, [20000.0] * 3)


def test_a_step_of_zero_weight_is_not_finite_as_in_plain_pytorch() -> None:
    def nothing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return parts(model, batch)[0], torch.zeros(())

    ran = run(lambda hp, rank: Task(model=nn.Linear(6, 3), train=examples(), loss=nothing), 2)
    assert ran.outcome.code is ExitCode.NotFinite


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda loss: loss.reshape(1), "got shape [1]"),
        (lambda loss: (loss, 3), "got (shape [], int)"),
        (lambda loss: (loss, loss.reshape(1)), "got (shape [], shape [1])"),
        (lambda loss: [loss, loss], "got list"),
        (lambda loss: None, "got NoneType"),
    ],
)
def test_a_loss_of_another_shape_is_refused(returned: Any, found: str) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return returned(mean(model, batch))

    outcome = run(lambda hp, rank: Task(model=nn.Linear(6, 3), train=examples(), loss=loss)).outcome
    assert outcome.code is ExitCode.UserError
    assert outcome.message.endswith(found)
