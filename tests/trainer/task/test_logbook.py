"""What a task logs in training: means over all replicas and passes, in the step's one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.in_threads import ThreadBackend, in_threads
from tests.trainer.tasks import Network, examples, loss
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task, log
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.task import logbook
from tpu_trainer.task.logbook import MOST_NAMES, Logbook, LoggedCurve, Style, note, use_book

Call = Callable[[int, int], None]
"""Takes the rank and the pass, counted from 0; logs."""


def logged(call: Call, replicas: int = 2, **spec: Any) -> Ran:
    """A run whose loss makes `call`."""

    def made(hp: Any, rank: int) -> Task:
        passes = iter(range(1000))

        def logging(model: nn.Module, batch: Any) -> Tensor:
            call(rank, next(passes))
            return loss(model, batch)

        return Task(Network(), examples(), logging)

    return run(made, replicas, **{"trainSteps": 6, **spec})


def last(call: Call, **more: Any) -> dict[str, float]:
    """The last values, as the result has them."""
    metrics = dict(logged(call, **more).outcome.metrics)
    del metrics["loss"]
    return metrics


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda rank, _: log("x", rank), 0.5),
        (lambda rank, _: log("x", torch.tensor([rank], dtype=torch.bfloat16)), 0.5),
        (lambda rank, _: log("x", rank, weight=1 + 3 * rank), 0.8),
        (lambda rank, _: log("x", torch.tensor(rank), weight=torch.tensor(1 + 3 * rank)), 0.8),
        (lambda rank, _: log("x", math.nan if rank else 3.0, weight=0 if rank else 2), 3.0),
        (lambda rank, number: log("x", number), 5.0),
        (lambda rank, number: [log("x", 1.0), log("x", 2.0)], 1.5),
        (lambda rank, number: log("x", math.inf if rank else 0.0), math.inf),
    ],
    ids=["number", "tensor", "weights", "weight tensors", "nothing", "step", "twice", "infinite"],
)
def test_a_value_is_the_weighted_mean_over_the_replicas(call: Call, value: float) -> None:
    assert last(call) == {"x": pytest.approx(value)}


def test_a_value_is_the_mean_over_the_passes_of_a_step() -> None:
    batch = {"global": 16, "perReplica": 4, "accumulation": 2}
    # The last step has the passes 10 and 11 of each replica.
    assert last(lambda rank, number: log("x", number), batch=batch) == {"x": 10.5}


def test_a_value_that_is_not_finite_spoils_no_other_and_does_not_stop_the_run() -> None:
    found = last(lambda rank, _: [log("bad", math.nan if rank else 1.0), log("good", rank)])
    assert math.isnan(found["bad"])
    assert found["good"] == 0.5


def test_names_of_some_replicas_or_steps_only_are_means_over_those_that_have_them() -> None:
    def call(rank: int, number: int) -> None:
        if rank == 1:
            log("of one", 5.0)
        if number % 3 == 0:
            log("of some steps", number)
        if number == 4:
            log("late", rank)

    assert last(call) == {"of one": 5.0, "of some steps": 3.0, "late": 0.5}


def test_what_is_logged_costs_no_further_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    reduce = ThreadBackend.reduce

    def counted(self: ThreadBackend, gradients: Any, signals: Tensor) -> Any:
        calls.append(len(signals))
        return reduce(self, gradients, signals)

    monkeypatch.setattr(ThreadBackend, "reduce", counted)
    logged(lambda rank, number: [log("a", 1.0), log("b", 2.0)])
    assert len(calls) == 2 * 6
    assert len(set(calls)) == 1


def test_a_run_takes_so_many_names_and_says_which_ones_it_drops() -> None:
    ran = logged(lambda rank, number: [log(f"{number} {index}", 1.0) for index in range(30)], replicas=1)
    assert ran.outcome.code is ExitCode.Succeeded
    assert len(ran.outcome.metrics) == 1 + MOST_NAMES
    (warning,) = ran.warnings
    assert f"a run can log {MOST_NAMES} names" in warning


def test_names_do_no_harm_in_a_terminal() -> None:
    assert list(last(lambda rank, _: log("a\x1b[2J\n\ud800\u202e<b>", 1.0))) == ["a?[2J???<b>"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("x", torch.zeros(2), "shape [2]"),
        ("x", "0.5", "got a str"),
        ("x", None, "got a NoneType"),
        ("x", torch.tensor(1j), "a single number"),
        ("", 1.0, "name must be text of 1 to 128"),
        ("x" * 129, 1.0, "got 129 characters"),
        (7, 1.0, "got a int"),
        ("loss", 1.0, "is the training loss"),
    ],
)
def test_what_cannot_be_logged_is_an_error_of_the_task(name: Any, value: Any, why: str) -> None:
    ran = logged(lambda rank, _: log(name, value), replicas=1)
    assert ran.outcome.code is ExitCode.UserError
    assert why in ran.outcome.message


def test_outside_of_a_training_nothing_is_logged() -> None:
    log("x", torch.zeros(1))


def test_what_an_evaluation_logs_is_left_out() -> None:
    def made(hp: Any, rank: int) -> Task:
        def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            log("in evaluation", 1.0)
            return {"size": torch.ones(len(batch[0]))}

        return Task(Network(), examples(), loss, evaluation=examples(), metrics=metrics)

    assert set(run(made, trainSteps=3).outcome.metrics) == {"loss", "size"}


def curves(
    world: int, steps: int, call: Callable[[int, int], None], ends: tuple[int, ...] = ()
) -> list[list[LoggedCurve]]:
    """What every replica reads of `steps` steps, epochs ending with `ends`."""

    def replica(backend: ThreadBackend) -> list[LoggedCurve]:
        book = Logbook(backend)
        with use_book(book):
            for step in range(1, steps + 1):
                with book.passes():
                    call(backend.rank, step)
                row = book.row()
                _, total = backend.reduce([], row.values)
                if book.read(step, [(row.names, total.tolist())]):
                    book.agree()
                if step in ends:
                    book.end_epoch(step)
        book.finish(steps)
        return book.take()

    return in_threads(world, replica)


def test_a_value_per_epoch_is_the_mean_or_the_sum_of_its_steps() -> None:
    def call(rank: int, step: int) -> None:
        note("mean", step, 1.0, Style(step=False, epoch=True))
        note("sum", step, 1.0, Style("sum", step=True, epoch=True))

    for found in curves(2, 5, call, ends=(2, 4)):
        by_name = {curve.name: curve.points for curve in found}
        assert by_name == {
            "mean": ((2, 1.5), (4, 3.5), (5, 5.0)),
            "sum_step": tuple((step, 2.0 * step) for step in range(1, 6)),
            "sum_epoch": ((2, 6.0), (4, 14.0), (5, 10.0)),
        }


def test_a_new_name_is_agreed_upon_without_losing_its_first_value() -> None:
    found = curves(2, 5, lambda rank, step: note("x", step, 1.0, Style()) if rank and step == 3 else None)
    assert [[(curve.name, curve.points) for curve in each] for each in found] == [[("x", ((4, 3.0),))]] * 2


class Chip(ThreadBackend):
    """Programs are compiled, and a replica that runs another one than the others would wait for them forever."""

    one_program = True
    store: Any = None


def test_on_a_chip_a_value_that_one_replica_alone_logs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbook, "AGREEMENT_SECONDS", 0.01)
    store = torch.distributed.HashStore()

    def replica(backend: ThreadBackend) -> None:
        backend.__class__, backend.store = Chip, store
        book = Logbook(backend)
        with use_book(book):
            for _ in range(2):
                note("x", 1.0, 1.0, Style())
                book.row()
            if backend.rank:
                note("x", torch.ones((), device="meta"), 1.0, Style())
                book.row()

    _, error = in_threads(2, replica, keep=UserCodeError)
    assert isinstance(error, UserCodeError)
    assert str(error).startswith("process 1 logs values of x in")
