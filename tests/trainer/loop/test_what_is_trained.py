"""Which parameters a step trains, and that they are trained as in plain PyTorch, whatever hooks do on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer import plain
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.checkpoint.checkpointer import CheckpointSchedule
from tpu_trainer.loop.entrypoint import Loaded
from tpu_trainer.task.hooks import Hooks

CLOSE = 1e-5


def examples(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(72, 6, generator=generator).to(dtype), torch.randint(0, 3, (72,), generator=generator)
    )


class Net(nn.Module):
    """A backbone and a head; `spare` is in no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.spare = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.back(x)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


AdamW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
Momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Before = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Changing(Hooks):
    """Calls `change` before every step, or at the start of every epoch."""

    def __init__(self, model: nn.Module, change: Before, by_epoch: bool = False) -> None:
        self._model, self._change, self._by_epoch = model, change, by_epoch

    def fit_begins(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        self._optimizer = optimizer

    def epoch_begins(self, epoch: int) -> None:
        if self._by_epoch:
            self._change(self._model, self._optimizer, epoch)

    def step_begins(self, batch: Any, step: int) -> None:
        if not self._by_epoch:
            self._change(self._model, self._optimizer, step - 1)


def loaded(
    make: Callable[[], nn.Module], optimizer: Any, change: Before | None = None, by_epoch: bool = False
) -> Loaded:
    model = make()
    task = Task(model=model, train=examples(), loss=loss, optimizer=lambda parameters, hp: optimizer(parameters))
    return Loaded(task, Hooks() if change is None else Changing(model, change, by_epoch))


def head_first() -> Net:
    net = Net()
    net.back.requires_grad_(False)
    return net


def _replaced(task: Task, **changes: Any) -> Task:
    return Task(**{**vars(task), **changes})


class Normed(Net):
    """Its batch norm is frozen as long as it is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(3 * x))


def resting() -> nn.Module:
    model = Normed()
    model.norm.eval()
    return model


@pytest.mark.parametrize(
    ("make", "plainly"),
    [
        pytest.param(resting, resting, id="a part in evaluation mode stays there"),
        pytest.param(lambda: Normed().eval(), Normed, id="a whole model in evaluation mode is trained"),
    ],
)
def test_modules_are_trained_in_the_modes_that_the_task_set(
    make: Callable[[], nn.Module], plainly: Callable[[], nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    def task(hp: Any, rank: int) -> Loaded:
        found = loaded(make, AdamW)
        evaluated = {"evaluation": examples(), "metrics": lambda model, batch: {"first": model(batch[0])[:, 0]}}
        return found._replace(task=_replaced(found.task, **evaluated))

    expected, losses = plain.trained(plainly, examples(), loss, lambda model: AdamW(model.parameters()))
    ran = run(task, evaluateEverySteps=10)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    assert plain.distance(ran.models[0], expected) < CLOSE
    assert ran.losses == pytest.approx(losses, abs=CLOSE)
    assert "in evaluation mode" in capfd.readouterr().out


def test_a_parameter_without_a_gradient_stays_unchanged() -> None:
    ran = run(lambda hp, rank: loaded(Net, AdamW), 2)
    assert torch.equal(ran.models[0].spare.weight, torch.ones(6))


def test_a_parameter_outside_the_optimizer_is_neither_summed_nor_gathers_gradients() -> None:
    def late(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 12:
            optimizer.add_param_group({"params": list(model.back.parameters())})

    def only_the_head(hp: Any, rank: int) -> Loaded:
        found = loaded(Net, Momentum, late)
        model = found.task.model
        return found._replace(task=_replaced(found.task, optimizer=lambda p, hp: Momentum(model.head.parameters())))

    def cleared(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        late(model, optimizer, step)
        model.zero_grad()

    expected, _ = plain.trained(Net, examples(), loss, lambda model: Momentum(model.head.parameters()), before=cleared)
    ran = run(only_the_head, 2)
    ran.assert_replicas_equal()
    assert plain.distance(ran.models[0], expected) < CLOSE


def only(part: Callable[[Net], nn.Module], make: Callable[[], Net] = Net, **more: Any) -> Callable[[Any, int], Task]:
    """A task whose optimizer has the parameters of a part of the model."""

    def task(hp: Any, rank: int) -> Task:
        model = make()
        made = {name: value(model) for name, value in more.items()}
        return Task(model, examples(), loss, optimizer=lambda p, hp: Momentum(part(model).parameters()), **made)

    return task


class Teaching(Net):
    """Its backbone runs, but not for a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = torch.tanh(self.back(x))
        return self.head(features)


class AddingLate(Hooks):
    """Adds the backbone at the second epoch."""

    def __init__(self, model: Net) -> None:
        self._model = model
        self._added = False

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if len(optimizer.param_groups) == 1 and self._added:
            optimizer.add_param_group({"params": list(self._model.back.parameters())})

    def epoch_begins(self, epoch: int) -> None:
        self._added = epoch > 0


@pytest.mark.parametrize(
    ("task", "named"),
    [
        pytest.param(only(lambda net: net.head), "2 of the model's 6", id="no hooks"),
        pytest.param(
            only(lambda net: net.head, hooks=lambda _: Hooks()), "2 of the model's 6", id="hooks that leave it so"
        ),
        pytest.param(only(lambda net: net.head, head_first), None, id="the others are frozen"),
        pytest.param(only(lambda net: net.head, Teaching), None, id="the others run without gradients"),
        pytest.param(only(lambda net: net.head, hooks=AddingLate), None, id="a hook adds them later"),
        pytest.param(lambda hp, rank: loaded(Net, Momentum), None, id="some are in no forward pass"),
    ],
)
def test_a_part_that_gets_gradients_and_is_in_no_group_is_told_once(task: Any, named: str | None) -> None:
    told = [text for text in run(task, 2).warnings if "are not trained: back.weight, back.bias get" in text]
    assert [named is not None and named in text for text in told] == [True] * (named is not None)


def test_a_parameter_that_some_replicas_use_is_trained_alike_on_all() -> None:
    def own_way(hp: Any, rank: int) -> Loaded:
        found = loaded(Net, AdamW)

        def with_spare(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss(model, batch) + (model.spare(batch[0]).square().mean() if rank == 1 else 0)

        return found._replace(task=_replaced(found.task, loss=with_spare))

    ran = run(own_way, 2)
    assert ran.outcome.code is ExitCode.Succeeded
    ran.assert_replicas_equal()
    assert not torch.equal(ran.models[0].spare.weight, torch.ones(6))


def test_groups_may_come_from_a_set_with_another_order_on_every_replica() -> None:
    def shuffled(hp: Any, rank: int) -> Loaded:
        found = loaded(Net, AdamW)

        def build(parameters: Any, hp: Any) -> torch.optim.Optimizer:
            return AdamW(list(parameters)[:: -1 if rank else 1])

        return found._replace(task=_replaced(found.task, optimizer=build))

    ran = run(shuffled, 2)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    ran.assert_replicas_equal()


class Spectral(nn.Module):
    """Complex weights, one of them lazily conjugated on its way."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 4, dtype=dtype))
        self.head = nn.Linear(4, 3, dtype=torch.zeros((), dtype=dtype).real.dtype)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(x).to(self.mix.dtype) @ self.mix
        return self.head((mixed * mixed.conj()).real)


class Double(Net):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("make", "close"),
    [(Spectral, CLOSE), (lambda: Spectral(torch.complex128), 1e-12), (Double, 1e-14)],
    ids=["complex64", "complex128", "float64"],
)
def test_complex_and_double_parameters_are_trained_as_in_plain_pytorch(
    make: Callable[[], nn.Module], close: float, replicas: int
) -> None:
    expected, _ = plain.trained(make, examples(), loss, lambda model: AdamW(model.parameters()), steps=50)
    ran = run(lambda hp, rank: loaded(make, AdamW), replicas, trainSteps=50)
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    ran.assert_replicas_equal()
    assert plain.distance(ran.models[0], expected) < close


def test_all_replicas_start_from_rank_0s_complex_values() -> None:
    def own_start(hp: Any, rank: int) -> Loaded:
        torch.manual_seed(rank)
        return loaded(Spectral, AdamW)

    run(own_start, 2).assert_replicas_equal()


def sparse() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(8, 3, sparse=True))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def synchronised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3))


class Elsewhere(Net):
    """Its optimizer is given a parameter that is not the model's."""


class Bent(Net):
    """Its optimizer is LBFGS."""


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (sparse, "the gradient of a parameter"),
        (
            synchronised,
            "the model's 1 is a SyncBatch",
        ),
        (lazy, "the model's 0.weight has no"),
        (Elsewhere, "the optimizer holds a"),
        (
            Bent,
            "optimizer LBFGS evaluates a closure",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_a_user_error(make: Callable[[], nn.Module], sentence: str) -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        if make is Bent:
            return torch.optim.LBFGS(parameters)
        stray = [nn.Parameter(torch.zeros(2))] if make is Elsewhere else []
        return torch.optim.SGD([*parameters, *stray], lr=0.1)

    def indices(model: nn.Module, batch: Any) -> Tensor:
        given = batch[1].unsqueeze(1) if make is sparse else batch[0]
        return nn.functional.cross_entropy(model(given), batch[1])

    def task(hp: Any, rank: int) -> Loaded:
        found = loaded(make, build)
        return found._replace(task=_replaced(found.task, loss=indices))

    outcome = run(task, 2).outcome
    assert outcome.code is ExitCode.UserError
    assert outcome.message.startswith(sentence)


def test_what_is_unfrozen_and_gets_no_gradient_is_told_once() -> None:
    def thaw(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        model.spare.requires_grad_(step >= 12)
        model.back.requires_grad_(step % 2 == 0)

    ran = run(lambda hp, rank: loaded(Net, AdamW, thaw), 2)
    (warning,) = [warning for warning in ran.warnings if "unfrozen" in warning]
    assert warning.startswith("spare.weight, spare.bias were")
    assert "10" in warning


@pytest.mark.parametrize("by_epoch", [True, False], ids=["in the epoch's hook", "in the step's hook"])
def test_a_resumed_run_has_the_groups_that_hooks_had_added(tmp_path: Path, by_epoch: bool) -> None:
    def grow(model: Net, optimizer: torch.optim.Optimizer, at: int) -> None:
        if at == (3 if by_epoch else 12):
            model.back.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.back.parameters()), "lr": 0.02})

    def task(hp: Any, rank: int) -> Loaded:
        return loaded(head_first, AdamW, grow, by_epoch)

    schedule = {"schedule": {"name": "Linear"}, "warmupSteps": 4}
    whole = run(task, 2, **schedule)
    for stop_at in (12, 13, 20):
        checkpoint = {"uri": str(tmp_path / str(stop_at)), "keep": 1}
        first = run(task, 2, stop=_after(stop_at, 2), checkpoint=checkpoint, **schedule)
        assert first.outcome.code is ExitCode.Preempted
        job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
        second = run(task, 2, checkpoint=checkpoint, job=job, **schedule)
        assert second.outcome.code is ExitCode.Succeeded, second.outcome.message
        second.assert_replicas_equal()
        assert plain.distance(second.models[0], whole.models[0]) == 0
        assert first.losses + second.losses == whole.losses


@pytest.mark.parametrize("make", [Normed, resting], ids=["put into evaluation mode", "put into training mode"])
def test_a_resumed_run_has_the_modes_that_hooks_had_set(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    def change(model: Normed, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            model.norm.train(make is resting)

    def task(hp: Any, rank: int) -> Loaded:
        return loaded(make, AdamW, change, by_epoch=True)

    whole = run(task)
    checkpoint = {"uri": str(tmp_path), "keep": 1}
    first = run(task, stop=_after(13, 1), checkpoint=checkpoint)
    job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 2}
    second = run(task, checkpoint=checkpoint, job=job)
    assert second.outcome.code is ExitCode.Succeeded, second.outcome.message
    assert first.losses + second.losses == whole.losses
    assert plain.distance(second.models[0], whole.models[0]) == 0


def _after(step: int, replicas: int) -> Callable[[], bool]:
    """Asks for a stop in step `step`: all replicas ask this once a step."""

    class Flag:
        asked = 0

        def __call__(self) -> bool:
            self.asked += 1
            # Each replica once more before the first step.
            return self.asked > step * replicas

        def arrived(self) -> bool:
            return False

    return Flag()


def test_a_checkpoint_of_other_parameter_groups_is_refused(tmp_path: Path) -> None:
    def build(names: list[str]) -> Callable[[Any, int], Loaded]:
        def task(hp: Any, rank: int) -> Loaded:
            found = loaded(Net, AdamW)
            parameters = dict(found.task.model.named_parameters())
            chosen = [parameters[name] for name in names]
            return found._replace(task=_replaced(found.task, optimizer=lambda p, hp: AdamW(chosen)))

        return task

    checkpoint = {"uri": str(tmp_path), "keep": 1}
    run(build(["back.bias", "back.weight"]), checkpoint=checkpoint, trainSteps=10)
    outcome = run(build(["back.weight", "spare.bias"]), checkpoint=checkpoint, trainSteps=20).outcome
    assert outcome.code is ExitCode.UserError
    assert "spare.bias in this run" in outcome.message


def diverging_at(step: int) -> Callable[[Any, int], Loaded]:
    def task(hp: Any, rank: int) -> Loaded:
        def change(model: Net, optimizer: torch.optim.Optimizer, at: int) -> None:
            if at == step and rank == 1:
                with torch.no_grad():
                    model.head.bias[0] += 1

        return loaded(Net, AdamW, change)

    return task


def test_replicas_that_differ_at_the_end_do_not_succeed() -> None:
    outcome = run(diverging_at(37), 2).outcome
    assert (outcome.code, outcome.step) == (ExitCode.Diverged, 40)
    assert "after step 40 the parameters" in outcome.message
    assert "replica 1" in outcome.message
    assert "replica 0" in outcome.message


def test_all_replicas_compare_a_checkpoint_that_the_writers_clock_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count(1)
    monkeypatch.setattr(CheckpointSchedule, "by_time", lambda due, seconds: next(steps) in (7, 18))
    checkpoint = {"uri": str(tmp_path), "keep": 3, "everySeconds": 300}
    assert run(diverging_at(16), 2, checkpoint=checkpoint).outcome.code is ExitCode.Diverged
    assert {path.parent.name for path in tmp_path.rglob("COMMIT")} == {"step-00000007-5f0c-1"}


def test_a_weight_in_two_places_and_groups_with_rates_of_their_own_are_trained_as_in_plain_pytorch() -> None:
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(6, 6)
            self.again.weight = self.back.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.again(torch.tanh(self.back(x)))))

    def taking_turns(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        """As the two halves of a GAN: each is trained in its own steps."""
        model.back.requires_grad_(step % 2 == 0)
        model.head.requires_grad_(step % 2 == 1)

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        back = [*model.back.parameters(), model.again.bias]
        return AdamW([{"params": list(model.head.parameters()), "lr": 0.01}, {"params": back, "weight_decay": 0.0}])

    expected, _ = plain.trained(Shared, examples(), loss, groups, before=taking_turns)

    def task(hp: Any, rank: int) -> Loaded:
        found = loaded(Shared, AdamW, taking_turns)
        model = found.task.model
        return found._replace(task=_replaced(found.task, optimizer=lambda parameters, hp: groups(model)))

    ran = run(task, 2)
    ran.assert_replicas_equal()
    assert plain.distance(ran.models[0], expected) < CLOSE


def test_a_checkpoint_of_replicas_that_differ_is_not_committed(tmp_path: Path) -> None:
    ran: Ran = run(diverging_at(17), 2, checkpoint={"uri": str(tmp_path), "keep": 3, "everySteps": 5})
    assert (ran.outcome.code, ran.outcome.step) == (ExitCode.Diverged, 20)
    kept = {path.parent.name for path in tmp_path.rglob("COMMIT")}
    assert kept == {"step-00000005-5f0c-1", "step-00000010-5f0c-1", "step-00000015-5f0c-1"}
