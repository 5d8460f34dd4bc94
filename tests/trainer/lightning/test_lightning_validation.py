"""What `validation_step` logs covers the whole held-out set, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

from tests.trainer.in_threads import in_threads
from tests.trainer.task.test_task import hyperparameters
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.order import Share
from tpu_trainer.lightning import adopt
from tpu_trainer.loop.evaluate import evaluate, plan_without_padding

HELD_OUT = 23
ROWS = 4
VALUES = torch.linspace(-1, 1.5, HELD_OUT)

Step = Callable[["Watching", Tensor], None]


class Watching(lightning.LightningModule):
    """Its held-out examples are numbers; the test says what a validation step does with a batch of them."""

    def __init__(self, step: Step, metrics: dict[str, nn.Module], at_end: Callable[[Watching], None] | None) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.metrics = nn.ModuleDict(metrics)
        self.own_step, self.at_end, self.seen = step, at_end, []

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(VALUES))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(VALUES), shuffle=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (values,) = batch
        assert not self.training
        self.seen += values.tolist()
        self.own_step(self, values)

    def on_validation_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self)


def evaluated(
    world: int,
    step: Step,
    metrics: Callable[[], dict[str, nn.Module]] = dict,
    at_end: Callable[[Watching], None] | None = None,
    times: int = 1,
) -> list[dict[str, float]]:
    """The metrics after `times` evaluations, as every process knows them."""

    def replica(backend: Any) -> dict[str, float]:
        share = Share(backend.rank, world)
        task, _ = adopt(Watching(step, metrics(), at_end), None, hyperparameters(), share)
        for _ in range(times):
            result = evaluate(task, ROWS, share, backend)
        assert task.model.training
        return result

    return in_threads(world, replica)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("size", [1, 23, 24])
def test_an_unfilled_plan_has_every_example_once_and_a_batch_for_every_process(world: int, size: int) -> None:
    plans = [plan_without_padding(size, ROWS, Share(rank, world)) for rank in range(world)]
    counted = [i for plan in plans for batch in plan for i in batch.indices[: batch.counted]]
    assert sorted(counted) == list(range(size))
    assert all(plan and len(batch.indices) <= ROWS for plan in plans for batch in plan)
    assert all(len({len(batch.indices) for batch in plan}) <= 2 for plan in plans)


WORLDS = pytest.mark.parametrize("world", [1, 2, 4, 30])
"""30 processes are more than there are examples."""


@WORLDS
def test_logged_values_are_means_over_the_examples(world: int) -> None:
    def step(module: Watching, values: Tensor) -> None:
        module.log("value", values.mean())
        module.log("sum", values.sum(), reduce_fx="sum")
        # As a language model does: a batch counts by its tokens, here 3 for every negative number and 1 for others.
        tokens = torch.where(values < 0, 3, 1)
        module.log("by_tokens", (values * tokens).sum() / tokens.sum(), batch_size=int(tokens.sum()))
        module.log("only_of_this_step", values.mean(), on_step=True, on_epoch=False)

    tokens = torch.where(VALUES < 0, 3, 1)
    expected = {
        "value": VALUES.mean().item(),
        "sum": VALUES.sum().item(),
        "by_tokens": ((VALUES * tokens).sum() / tokens.sum()).item(),
    }
    assert evaluated(world, step) == [pytest.approx(expected, abs=1e-6)] * world


@WORLDS
def test_metric_objects_cover_the_whole_set_logged_or_computed_at_the_end(world: int) -> None:
    def metrics() -> dict[str, nn.Module]:
        return {
            "mean": MeanMetric(),
            "largest": MaxMetric(),
            "smallest": MinMetric(),
            "sum": SumMetric(),
            "classes": MetricCollection(
                {"accuracy": MulticlassAccuracy(3, average="micro"), "matrix": MulticlassConfusionMatrix(3)}
            ),
        }

    def step(module: Watching, values: Tensor) -> None:
        for name in ("mean", "largest", "smallest", "sum"):
            module.metrics[name](values)
        guessed = torch.where(values < 0, 0, 2)
        module.metrics["classes"].update(guessed, torch.where(values < 0.5, 0, 2))
        module.log("mean", module.metrics["mean"])
        module.log_dict({name: module.metrics[name] for name in ("largest", "smallest")})

    def at_end(module: Watching) -> None:
        found = module.metrics["classes"].compute()
        module.log("accuracy", found["accuracy"])
        module.log("missed", found["matrix"][0, 2].float())
        module.metrics["classes"].reset()
        # Never reset: it keeps counting from one evaluation to the next.
        module.log("sum", module.metrics["sum"].compute())

    missed = ((VALUES >= 0) & (VALUES < 0.5)).sum().item()
    expected = {
        "mean": VALUES.mean().item(),
        "largest": 1.5,
        "smallest": -1.0,
        "accuracy": 1 - missed / HELD_OUT,
        "missed": missed,
        "sum": 2 * VALUES.sum().item(),
    }
    found = evaluated(world, step, metrics, at_end, times=2)
    assert found == [pytest.approx(expected, abs=1e-5)] * world


def mean_of_outputs(module: Watching) -> None:
    module.log("mean", sum(module.seen) / len(module.seen))
    module.seen.clear()


@pytest.mark.parametrize("world", [1, 2, 30])
@pytest.mark.parametrize(
    ("at_end", "warns"),
    [
        (mean_of_outputs, True),
        (lambda module: module.log("mean", float(module.seen[0]), sync_dist=True), False),
        (lambda module: module.log("metric", 1 - module.metrics["mean"].compute()), False),
        (lambda module: module.log("metric", module.metrics["mean"]), False),
    ],
)
def test_a_number_that_a_module_makes_of_its_own_outputs_is_a_remark_where_there_are_several_processes(
    world: int, at_end: Callable[[Watching], None], warns: bool
) -> None:
    uses_metric = not warns

    def step(module: Watching, values: Tensor) -> None:
        if uses_metric:
            module.metrics["mean"].update(values)

    def replica(backend: Any) -> list[str]:
        share = Share(backend.rank, world)
        task, hooks = adopt(Watching(step, {"mean": MeanMetric()}, at_end), None, hyperparameters(), share)
        for _ in range(2):
            evaluate(task, ROWS, share, backend)
        return list(hooks.remarks)

    for remarks in in_threads(world, replica):
        assert len(remarks) == int(warns and world > 1)
        assert all(text.startswith("on_validation_epoch_end ") for text in remarks)


def test_counts_beyond_the_integers_of_float32_stay_exact() -> None:
    class Many(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("many", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, count: int) -> None:
            self.many += 2**25 + count

        def compute(self) -> Tensor:
            return self.many

    def step(module: Watching, values: Tensor) -> None:
        module.metrics["count"].update(len(values))

    def at_end(module: Watching) -> None:
        module.log("exact", float(module.metrics["count"].compute() == 6 * 2**25 + HELD_OUT))

    # 23 examples in batches of 4 are six batches on two processes.
    assert evaluated(2, step, lambda: {"count": Many()}, at_end) == [{"exact": 1.0}] * 2


@WORLDS
def test_metrics_that_keep_every_value_cover_the_whole_set_too(world: int) -> None:
    def step(module: Watching, values: Tensor) -> None:
        module.metrics["all"].update(values)
        module.metrics["auroc"].update(values.sigmoid(), (values.cos() > 0.7).int())
        module.log("auroc", module.metrics["auroc"])

    def at_end(module: Watching) -> None:
        module.log("middle", module.metrics["all"].compute().median())

    metrics = {"all": CatMetric, "auroc": BinaryAUROC}
    found = evaluated(world, step, lambda: {name: kind() for name, kind in metrics.items()}, at_end)
    alone = BinaryAUROC()
    alone.update(VALUES.sigmoid(), (VALUES.cos() > 0.7).int())
    expected = {"middle": VALUES.median().item(), "auroc": alone.compute().item()}
    assert found == [pytest.approx(expected, abs=1e-6)] * world


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (lambda m, v: m.log("loss", v.mean()), '"loss" is the training loss'),
        (lambda m, v: m.log("v", v.max(), reduce_fx="max"), "reduce_fx=max"),
        (lambda m, v: m.log("v", v), 'self.log("v"): a single'),
        (lambda m, v: m.log("v", "much"), "a number, tensor or metric"),
        (lambda m, v: m.log(f"v{m.trainer.global_rank}", v.mean()), "do not all log the same names"),
    ],
)
def test_what_cannot_be_reduced_is_refused(step: Step, complaint: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        evaluated(2, step, lambda: {"all": CatMetric(), "mean": MeanMetric()})
    assert complaint in str(caught.value)
