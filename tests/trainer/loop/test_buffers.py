"""Buffers that take part in training: rank 0's on every replica, and the same with and without a restart or an
evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer import fork_server
from tests.trainer.gang_processes import Launcher, run_spec, start_replicas
from tests.trainer.in_threads import ThreadBackend
from tests.trainer.whole_runs import Ran, Stopping, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hooks, Task
from tpu_trainer.task.task import Hyperparameters

STEPS, STOP, LATE = 12, 5, 8
"""Steps of a run, after how many the first attempt stops, and when a hook freezes norms."""


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(72, 6, generator=generator), torch.randint(0, 3, (72,), generator=generator))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.mask


class Centre(Base):
    """A running centre, as of DINO: what a pass reads is what the passes before have left."""

    write = "in place"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x - self.centre)
        if self.training:
            new = 0.5 * self.centre + 0.5 * x.detach().mean(dim=0)
            self.seen += len(x)
            if self.write == "in place":
                self.centre.copy_(new)
            elif self.write == "past the count":
                self.centre.data.copy_(new)
            else:
                self.centre = new
        return out


class PastTheCount(Centre):
    write = "past the count"


class Replaced(Centre):
    write = "replaced"


class SometimesOnly(Centre):
    """Whether it changes depends on the replica's own examples."""

    def forward(self, x: Tensor) -> Tensor:
        out = Base.forward(self, x - self.centre)
        if self.training and float(x.detach().mean()) > 0:
            self.centre += 0.1 * x.detach().mean(dim=0)
        return out


class Norm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class OnlyNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(6), nn.Linear(6, 3))


class Renorm(nn.BatchNorm1d):
    """Reads its statistics in training."""

    def forward(self, x: Tensor) -> Tensor:
        out = (x - self.running_mean) / (self.running_var + 1e-5).sqrt()
        super().forward(x)
        return out


class OwnNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Renorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Freezing(Hooks):
    def __init__(self, model: nn.Module, hook: str) -> None:
        self._model, self._hook = model, hook

    def step_begins(self, batch: Any, step: int) -> None:
        if self._hook == "step_begins" and step == LATE:
            self._model.norm.eval()

    def after_step(self, batch: Any, loss: Tensor, step: int) -> None:
        if self._hook == "after_step" and step == LATE:
            self._model.norm.eval()


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"score": model(batch[0]).sum(dim=1)}


def task(make: Callable[[], nn.Module], hook: str = "", watch: Any = None) -> Callable[[Hyperparameters, int], Task]:
    def made(hp: Hyperparameters, rank: int) -> Task:
        model = make()

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            if watch is not None:
                watch(rank, model)
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        return Task(model, examples(), loss, evaluation=examples(), metrics=metrics, hooks=Freezing(model, hook))

    return made


MODELS = (Centre, PastTheCount, Replaced, SometimesOnly, Norm, OwnNorm)
LATE_FREEZES = ((Norm, "step_begins"), (Norm, "after_step"))
ALL = [*((make, "") for make in MODELS), *LATE_FREEZES]


def done(ran: Ran) -> Ran:
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    return ran


@pytest.mark.parametrize(("replicas", "make", "hook"), [*((2, *each) for each in ALL), (4, Norm, "after_step")])
def test_a_restart_and_evaluations_change_no_loss(
    tmp_path: Path, replicas: int, make: Callable[[], nn.Module], hook: str
) -> None:
    whole = done(run(task(make, hook), replicas, trainSteps=STEPS))
    evaluated = done(run(task(make, hook), replicas, trainSteps=STEPS, evaluateEverySteps=2))
    checkpoint = {"uri": str(tmp_path), "keep": 1}
    first = run(task(make, hook), replicas, stop=_stops(replicas), trainSteps=STEPS, checkpoint=checkpoint)
    assert first.outcome.code is ExitCode.Preempted, first.outcome.message
    second = done(run(task(make, hook), replicas, trainSteps=STEPS, checkpoint=checkpoint))
    assert evaluated.losses == whole.losses
    assert first.losses + second.losses == whole.losses
    assert second.outcome.metrics == whole.outcome.metrics == evaluated.outcome.metrics


def _stops(replicas: int) -> Callable[[], bool]:
    """All replicas share it, so it is asked more often."""
    return Stopping(STOP * replicas)


@pytest.mark.parametrize("make", [Centre, PastTheCount, Replaced, SometimesOnly, OwnNorm])
def test_every_replica_computes_with_the_buffers_of_rank_0(make: Callable[[], nn.Module]) -> None:
    seen: dict[int, list[list[Tensor]]] = {0: [], 1: []}

    def watch(rank: int, model: nn.Module) -> None:
        seen[rank].append([buffer.clone() for buffer in model.buffers()])

    done(run(task(make, watch=watch), 2, trainSteps=STEPS))
    assert len(seen[0]) == STEPS
    for zeros, ones in zip(seen[0], seen[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(zeros, ones, strict=True))
    # They do change.
    assert not all(torch.equal(a, b) for a, b in zip(seen[0][0], seen[0][-1], strict=True))


@pytest.mark.parametrize("beside", [(), (nn.BatchNorm1d(3),)], ids=["alone", "beside others"])
def test_a_buffer_that_one_replica_alone_has_registered_stays_its_own(
    tmp_path: Path, beside: tuple[nn.Module, ...]
) -> None:
    def register(rank: int, model: nn.Module) -> None:
        if rank == 1:
            model.register_buffer("seen", torch.ones(()), persistent=False)

    made = task(lambda: nn.Sequential(nn.Linear(6, 3), *deepcopy(beside)), watch=register)
    checkpoint = {"uri": str(tmp_path), "everySteps": 2, "keep": 1}
    done(run(made, 2, trainSteps=4, evaluateEverySteps=1, checkpoint=checkpoint))


def test_running_statistics_stay_each_replicas_own_also_after_an_evaluation() -> None:
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def watch(rank: int, model: nn.Module) -> None:
        seen[rank].append(model.norm.running_mean.clone())

    done(run(task(Norm, watch=watch), 2, trainSteps=STEPS))
    own = {rank: list(means) for rank, means in seen.items()}
    for means in seen.values():
        means.clear()
    done(run(task(Norm, watch=watch), 2, trainSteps=STEPS, evaluateEverySteps=2))
    assert not torch.equal(own[0][-1], own[1][-1])
    for rank in seen:
        assert all(torch.equal(a, b) for a, b in zip(own[rank], seen[rank], strict=True))


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many tensors rank 0 has sent in each broadcast, and how many numbers each gather had (negative)."""
    calls: list[int] = []
    broadcast, gather = ThreadBackend.broadcast, ThreadBackend.gather

    def counting(self: ThreadBackend, tensors: Any, source: int = 0) -> None:
        if self.rank == 0 and tensors:
            calls.append(len(tensors))
        broadcast(self, tensors, source)

    def asking(self: ThreadBackend, row: Any) -> Any:
        if self.rank == 0:
            calls.append(-len(row))
        return gather(self, row)

    with mock.patch.object(ThreadBackend, "broadcast", counting), mock.patch.object(ThreadBackend, "gather", asking):
        yield calls


def per_step(make: Callable[[], nn.Module]) -> list[int]:
    """What 20 steps more cost; the evaluation and the start are left out."""
    found = []
    for steps in (20, 40):
        with counted() as calls:
            done(run(task(make), 2, trainSteps=steps))
        found.append(calls)
    short, long = found
    rest = list(long)
    for call in short:
        rest.remove(call)
    return rest


def test_a_model_whose_only_buffers_are_of_norms_pays_nothing_in_a_step() -> None:
    assert per_step(OnlyNorm) == []


def test_a_constant_is_not_sent_again_and_what_changes_is_sent_in_every_step() -> None:
    assert [sent for sent in per_step(Base) if sent > 0] == []
    assert [sent for sent in per_step(Centre) if sent > 0] == [2] * 20
    assert [sent for sent in per_step(PastTheCount) if sent > 0] == [2] * 20


def test_not_a_number_in_another_replicas_buffer_is_replaced_like_any_value() -> None:
    class Bad(Centre):
        rank = 0

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.training and self.rank == 1:
                self.centre.fill_(torch.nan)
            return out

    def named(rank: int, model: nn.Module) -> None:
        model.rank = rank

    good, bad = (done(run(task(make, watch=named), 2, trainSteps=STEPS)) for make in (Centre, Bad))
    assert good.losses == bad.losses


def test_what_an_evaluation_writes_to_a_buffer_stays() -> None:
    """Such as the best metric so far."""

    class Noting(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("evaluations", torch.zeros(()))

    def counting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        model.evaluations += 1
        return {"count": model.evaluations.expand(len(batch[0]))}

    def made(hp: Hyperparameters, rank: int) -> Task:
        given = task(Noting)(hp, rank)
        return Task(given.model, given.train, given.loss, evaluation=examples(), metrics=counting)

    ran = done(run(made, 2, trainSteps=STEPS, evaluateEverySteps=4))
    assert all(float(model.evaluations) == 15 for model in ran.models)


@pytest.mark.parametrize("kind", ["torch", "xla", "chips"])
def test_in_processes_an_evaluation_changes_no_loss_either(launcher: Launcher, kind: str) -> None:
    every = {"entrypoint": "tests.trainer.loop.test_buffers:centred", "trainSteps": STEPS}
    gangs = [start_replicas(launcher, kind, 2, **every, **more) for more in ({}, {"evaluateEverySteps": 2})]
    for gang in gangs:
        assert set(gang.wait()) == {ExitCode.Succeeded}, gang.output()
    assert gangs[0].losses() == gangs[1].losses()
    # Neither a program nor a read of the device in every step.
    assert not any("compil" in warning for gang in gangs for texts in gang.warnings().values() for warning in texts)


def centred(hp: Hyperparameters) -> Task:
    return task(Centre)(hp, 0)


def test_under_lightnings_trainer_the_buffers_are_rank_0s_too(launcher: Launcher) -> None:
    every = {"hosts": 2, "replicas": 2, "trainSteps": STEPS}
    runs: list[tuple[str, dict[str, Any]]] = [("centred", {}), ("Centred", {"evaluateEverySteps": 3})]
    gangs = [
        launcher.start(
            run_spec(**every, entrypoint=f"tests.trainer.lightning_zoo:{name}", **more), packages=fork_server.FRAMEWORKS
        )
        for name, more in runs
    ]
    for gang in gangs:
        assert set(gang.wait()) == {ExitCode.Succeeded}, gang.output()
    assert gangs[0].losses() == pytest.approx(gangs[1].losses(), rel=1e-6)
