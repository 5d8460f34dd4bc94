"""How held-out data is read: by the task's workers, ahead of the device, and of several datasets."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import Dataset, get_worker_info

from tests.trainer import tasks
from tests.trainer.gang_processes import start_replicas
from tests.trainer.in_threads import ThreadBackend, in_threads
from tests.trainer.whole_runs import run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.data.order import Share
from tpu_trainer.gang.backends.feed import feed_ahead
from tpu_trainer.loop.evaluate import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tests.trainer.gang_processes import Launcher

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class WhereRead(Dataset[Any]):
    """Each example says whether a worker has read it, and its number."""

    def __init__(self, size: int = 13) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return float(get_worker_info() is not None), float(index)


def metrics(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"by_worker": batch[0], "number": batch[1]}


def made(**options: Any) -> Task:
    return Task(model=tasks.Network(), train=tasks.examples(), loss=tasks.loss, metrics=metrics, **options)


def evaluated(task: Task, world: int) -> list[Any]:
    return in_threads(world, lambda backend: evaluate(task, 2, Share(backend.rank, world), backend))


@pytest.mark.parametrize(
    ("options", "by_worker"),
    [
        ({}, 0.0),
        ({"workers": 2}, 1.0),
        ({"workers": 2, "evaluation_workers": 0}, 0.0),
        ({"evaluation_workers": 9}, 1.0),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_workers_read_held_out_data_and_every_example_counts_once(
    options: dict[str, int], by_worker: float, world: int
) -> None:
    task = made(evaluation=WhereRead(), **options)
    assert evaluated(task, world) == [{"by_worker": by_worker, "number": 6.0}] * world


class Opening(Dataset[Any]):
    """Opens a file at the first reading, as datasets of archives do; so only workers may read it."""

    def __init__(self) -> None:
        self.trainer = os.getpid()

    def __len__(self) -> int:
        return tasks.EXAMPLES

    def __getitem__(self, index: int) -> Any:
        assert os.getpid() != self.trainer
        return tasks.examples()[index]


def test_where_there_are_workers_the_trainer_itself_reads_nothing() -> None:
    def task(hp: Any, rank: int) -> Task:
        return Task(
            model=tasks.Network(),
            train=Opening(),
            loss=tasks.loss,
            evaluation=Opening(),
            metrics=lambda model, batch: {"label": batch[1].float()},
            workers=1,
        )

    ran = run(task, 2, trainSteps=2)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message


def test_held_out_batches_are_moved_ahead_as_training_batches_are() -> None:
    class Fed(ThreadBackend):
        fed = 0

        @contextmanager
        def feed(self, batches: Any, busy: Any = None) -> Iterator[Any]:
            with feed_ahead(batches, self.to_device) as ahead:
                yield map(self.counted, ahead)

        def counted(self, batch: Any) -> Any:
            self.fed += 1
            return batch

    def one(backend: ThreadBackend) -> Any:
        fed = Fed(0, 1, backend._meeting, None)
        return evaluate(made(evaluation=WhereRead()), 2, Share(0, 1), fed), fed.fed

    assert in_threads(1, one) == [({"by_worker": 0.0, "number": 6.0}, 7)]


def test_several_held_out_datasets_have_metrics_by_their_names() -> None:
    task = made(evaluation={"near": WhereRead(5), "far": WhereRead(9), "none": WhereRead(0)}, workers=1)
    assert (
        evaluated(task, 2) == [{"near/by_worker": 1.0, "near/number": 2.0, "far/by_worker": 1.0, "far/number": 4.0}] * 2
    )


def test_a_run_reports_the_metrics_of_several_held_out_datasets() -> None:
    sets = {"near": WhereRead(5), "far": WhereRead(9)}
    ran = run(lambda hp, rank: made(evaluation=sets), 2, trainSteps=4, evaluateEverySteps=2)
    assert ran.outcome.code is ExitCode.Succeeded
    assert [ran.outcome.metrics[name] for name in ("near/number", "far/number")] == [2.0, 4.0]


def test_one_of_several_held_out_datasets_that_differs_is_named() -> None:
    def task(hp: Any, rank: int) -> Task:
        return made(evaluation={"near": WhereRead(5), "far": WhereRead(9 + rank)})

    text = 'the evaluation["far"] data has 9 examples for host 0 and 10 for host 1: '
    assert run(task, 2).outcome.message.startswith(text)


def test_an_evaluator_takes_one_dataset(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValueError) as caught:
        Task(model=tasks.Network(), train=tasks.examples(), loss=tasks.loss, evaluation={}, evaluator=object())
    assert str(caught.value) == snapshot


def test_metrics_may_be_computed_on_the_host(launcher: Launcher) -> None:
    gang = start_replicas(launcher, "xla", 1, entrypoint="tests.trainer.tasks:measured_on_the_host")
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert gang.hosts[0].message()["metrics"]["half"] == 0.5
