"""recipe.scaling.learningRate: AdaScale, against algorithm 1 of Johnson et al. 2020 as it is written there."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainer import tasks
from tests.trainer.gang_processes import KINDS, Gang, Launcher, chips, run_spec
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer import Hooks, Task
from tpu_trainer.checkpoint.resume import Start, continued_start, document
from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.data.order import Position, permutation
from tpu_trainer.optim.adascale import Gained
from tpu_trainer.optim.schedule import LearningRateSetter
from tpu_trainer.task.task import Hyperparameters

SEED, B, STEPS, WARMUP, RATE, MOMENTUM, DECAY = 3, 4, 60, 6, 0.05, 0.9, 1e-3
SCHEDULES: dict[str, Callable[[float], float]] = {
    "Constant": lambda done: 1.0,
    "Linear": lambda done: 1 - done,
    "Cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "Step": lambda done: 0.5 if done >= (30 - WARMUP) / (STEPS - WARMUP) else 1.0,
}

BASE = Hyperparameters.of(parse_run_spec(run_spec(trainSteps=STEPS, warmupSteps=WARMUP, adaScaleBatchSize=B)))
RECIPE = {"name": "sgd", "learningRate": str(RATE), "momentum": str(MOMENTUM), "weightDecay": str(DECAY)}


def algorithm_1(
    groups: int,
    size: int,
    schedule: str = "Constant",
    *,
    clip: float | None = None,
    broken: int | None = None,
) -> tuple[list[float], list[float], list[Tensor]]:
    """Returns the losses, the gains and the last weights, in float64. `groups` of `size` examples make up a batch, and
    the step `broken` is skipped. The averages are those of the paper, with its correction for their start."""
    k = groups * size / B
    decay = max(1 - k / 1000, 0.0)
    torch.manual_seed(SEED)
    model = tasks.Network().double()
    parameters = list(model.parameters())
    momentum = [torch.zeros_like(parameter) for parameter in parameters]
    features, labels = (
        tensor.double() if tensor.is_floating_point() else tensor for tensor in tasks.examples().tensors
    )
    per_epoch = len(labels) // (groups * size)
    losses: list[float] = []
    gains: list[float] = []
    averages, seen, tau = [0.0, 0.0], 0, 0.0
    while tau < STEPS:
        t = len(losses)
        epoch, place = divmod(t, per_epoch)
        rows = permutation(len(labels), SEED, epoch)[place * groups * size : (place + 1) * groups * size]
        each, values = [], []
        for group in range(groups):
            mine = torch.tensor(rows[group * size : (group + 1) * size])
            value = nn.functional.cross_entropy(model(features[mine]), labels[mine])
            each.append(torch.autograd.grad(value, parameters))
            values.append(value.item())
        losses.append(sum(values) / groups)
        mean = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
        if t + 1 == broken:
            gains.append(0.0)
            continue
        # The variance of a group's gradient, unbiased; that of B examples is as many times smaller as they are more.
        spread = sum(sum((a - b).square().sum() for a, b in zip(one, mean, strict=True)) for one in each) / (groups - 1)
        variance = float(spread) * size / B
        square = float(sum(part.square().sum() for part in mean))
        seen += 1
        for index, estimate in enumerate((variance, square - variance / k)):
            averages[index] = decay * averages[index] + (1 - decay) * estimate
        sigma2, mu2 = (max(average / (1 - decay**seen), 0.0) for average in averages)
        gain = (sigma2 + mu2) / (sigma2 / k + mu2)
        step = math.floor(tau)
        done = (step - WARMUP) / (STEPS - WARMUP)
        rate = gain * RATE * ((step + 1) / WARMUP if step < WARMUP else SCHEDULES[schedule](done))
        factor = 1.0 if clip is None else min(1.0, clip / (math.sqrt(square) + 1e-6))
        with torch.no_grad():
            for parameter, part, buffer in zip(parameters, mean, momentum, strict=True):
                buffer.mul_(MOMENTUM).add_(part * factor + DECAY * parameter)
                parameter.sub_(rate * buffer)
        tau += gain
        gains.append(gain)
    return losses, gains, [parameter.detach() for parameter in parameters]


def trained(
    replicas: int = 1, passes: int = 1, k: float = 4, *, made: Any = None, adaptive: bool = True, **spec: Any
) -> Ran:
    batch = int(k * B)
    layout = {"global": batch, "perReplica": batch // replicas // passes, "accumulation": passes}
    given = {"trainSteps": STEPS, "warmupSteps": WARMUP, "seed": SEED, "recipe": RECIPE, **spec}
    given |= {"adaScaleBatchSize": B} if adaptive else {}
    return run(made or (lambda hp, rank: tasks.small(hp)), replicas, batch=layout, **given)


def assert_follows(ran: Ran, expected: tuple[list[float], list[float], list[Tensor]]) -> None:
    losses, _, weights = expected
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    ran.assert_replicas_equal()
    assert len(ran.losses) == len(losses)
    assert ran.losses == pytest.approx(losses, abs=2e-5)
    for found, wanted in zip(ran.weights(), weights, strict=True):
        assert torch.allclose(found.double(), wanted, atol=2e-5)


LAYOUTS = {
    "as many replicas as k": (4, 1, 4),
    "one replica that accumulates": (1, 4, 4),
    "two replicas that accumulate": (2, 2, 4),
    "more groups than k": (4, 2, 2),
    "fewer groups than k": (2, 1, 6),
    "k is no whole number": (2, 3, 4.5),
}


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [*product(["Cosine"], LAYOUTS), *product(["Constant", "Linear", "Step"], ["k is no whole number"])],
)
def test_a_run_follows_algorithm_1(schedule: str, layout: str) -> None:
    replicas, passes, k = LAYOUTS[layout]
    named = {"name": schedule, **({"milestones": [30], "factor": "0.5"} if schedule == "Step" else {})}
    ran = trained(replicas, passes, k, schedule=named)
    assert_follows(ran, algorithm_1(replicas * passes, int(k * B) // replicas // passes, schedule))


def start(launcher: Launcher, kind: str, **changes: Any) -> Gang:
    """Two replicas of one of KINDS, with two passes each, and k = 4."""
    xla = {"chips": "xla"}.get(kind, kind)
    spec = run_spec(
        backend=xla,
        hardware="TPU" if kind == "chips" else "CPU",
        hosts=1 if kind in ("chips", "xla-spmd") else 2,
        replicas=2,
        batch={"global": 4 * B, "perReplica": B, "accumulation": 2},
        **{"trainSteps": STEPS, "warmupSteps": WARMUP, "adaScaleBatchSize": B, **changes},
    )
    spec["optimizer"] = RECIPE
    if kind == "chips":
        return launcher.start(spec, module="tests.trainer.chip_replicas", **chips(2))
    return launcher.start(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_follows_algorithm_1(launcher: Launcher, kind: str) -> None:
    """`tests/trainer/crossings` has the compiled step."""
    gang = start(launcher, kind, schedule={"name": "Cosine"})
    assert set(gang.wait()) == {0}, gang.output()
    # With SPMD a pass is of the whole slice.
    groups, size = (2, 2 * B) if kind == "xla-spmd" else (4, B)
    losses, gains, _ = algorithm_1(groups, size, "Cosine")
    assert gang.losses() == pytest.approx(losses, abs=2e-5)
    (logged,) = gang.recorded().document["logged"]
    found = [(point["step"], point["mean"]) for point in logged["points"]]
    assert (logged["name"], found) == (
        "gain",
        [(step, pytest.approx(gain, rel=1e-3)) for step, gain in enumerate(gains, 1)],
    )


@pytest.mark.parametrize("kind", ["xla", "chips"])
def test_on_xla_the_rate_is_data_that_the_host_does_not_wait_for(launcher: Launcher, kind: str) -> None:
    """The doctor warns of programs that are compiled later, and of numbers that are read, in a few steps of ten."""
    gang = start(launcher, kind, trainSteps=160, schedule={"name": "Cosine", "factor": "0.1"})
    assert set(gang.wait()) == {0}, gang.output()
    assert "warning:" not in gang.output()


@pytest.mark.parametrize("clip", [0.05, 0.5])
def test_the_gain_is_measured_before_clipping(clip: float) -> None:
    assert_follows(trained(2, 2, gradientClipNorm=str(clip)), algorithm_1(4, B, clip=clip))


def spoilt(step: int, passes: int) -> Callable[[Any, int], Task]:
    """A task with an infinite loss in one pass of the step, on one replica."""

    def made(hp: Any, rank: int) -> Task:
        calls = 0

        def loss(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            value = tasks.loss(model, batch)
            return value * math.inf if rank == 0 and calls == step * passes else value

        return Task(model=tasks.Network(), train=tasks.examples(), loss=loss)

    return made


@pytest.mark.parametrize("layout", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("step", [1, 7])
def test_a_step_that_is_skipped_adds_nothing(layout: tuple[int, int], step: int) -> None:
    replicas, passes = layout
    ran = trained(replicas, passes, made=spoilt(step, passes), onNotFinite="Skip")
    expected = algorithm_1(4, B, broken=step)
    expected[0][step - 1] = math.inf
    assert_follows(ran, expected)


def test_without_a_larger_batch_a_run_is_the_recipes() -> None:
    adaptive, plain = trained(1, 1, 1), trained(1, 1, 1, adaptive=False)
    assert adaptive.outcome.step == plain.outcome.step == STEPS
    assert adaptive.losses == pytest.approx(plain.losses, abs=1e-6)


def checkpoints(folder: Path, step: int | None = None) -> dict[str, Any]:
    """The checkpoints of a job. `step`: forgets those after it."""
    for each in folder.glob("step-*"):
        if step is not None and int(each.name.split("-")[1]) > step:
            shutil.rmtree(each)
    return {"uri": str(folder), "everySteps": 4, "keep": 99}


@pytest.mark.parametrize("schedule", ["Cosine", "Step"])
@pytest.mark.parametrize("step", [4, 12])
def test_a_run_continues_bit_by_bit(tmp_path: Path, schedule: str, step: int) -> None:
    named = {"name": schedule, **({"milestones": [30], "factor": "0.5"} if schedule == "Step" else {})}
    straight = trained(2, 2, schedule=named, checkpoint=checkpoints(tmp_path))
    resumed = trained(2, 2, schedule=named, checkpoint=checkpoints(tmp_path, step))
    assert resumed.losses == straight.losses[step:]
    assert all(map(torch.equal, resumed.weights(), straight.weights()))
    assert resumed.outcome.metrics["gain"] == straight.outcome.metrics["gain"]


@pytest.mark.parametrize("move", [((4, 1), (2, 2)), ((4, 1), (1, 4)), ((1, 4), (4, 1))])
def test_on_another_number_of_replicas_a_run_goes_on_with_the_same_gains(
    tmp_path: Path, move: tuple[tuple[int, int], tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = move
    trained(*before, checkpoint=checkpoints(tmp_path))
    moved = trained(*after, checkpoint=checkpoints(tmp_path, 8))
    losses, gains, weights = algorithm_1(4, B)
    assert_follows(moved, (losses[8:], gains, weights))
    done = math.floor(sum(gains[:8]))
    assert f"with step 9 of {STEPS} at the most: the gains of AdaScale add up to {done}" in capsys.readouterr().out


def test_a_run_that_has_ended_has_nothing_left_to_train(tmp_path: Path) -> None:
    ended = trained(4, checkpoint=checkpoints(tmp_path))
    again = trained(4, checkpoint=checkpoints(tmp_path))
    assert again.outcome.code is ExitCode.Succeeded
    assert again.outcome.step == ended.outcome.step < STEPS
    assert "nothing left to train" in again.outcome.message
    assert all(map(torch.equal, again.weights(), ended.weights()))


@given(step=st.integers(0, 400), gains=st.floats(1, 4), before=st.integers(1, 8), after=st.integers(1, 8))
def test_with_another_batch_the_sum_of_the_gains_is_kept_and_the_steps_that_are_left_suffice(
    step: int, gains: float, before: int, after: int
) -> None:
    """A gain is at least 1."""
    old, new = (replace(BASE, global_batch_size=k * B) for k in (before, after))
    tau = min(step * min(gains, before), float(STEPS))
    kept = document(Start(), step, Position(), 0.1, old, NumericalHealth())
    kept["adaScale"] = {"batch": B, "variance": 1.0, "mean": 2.0, "steps": tau // 1, "rest": tau % 1, "step": step}
    start = continued_start(kept, new, 1, 2)
    assert start.gained is not None
    assert start.gained.steps + start.gained.rest == pytest.approx(tau)
    assert start.step + (STEPS - start.gained.steps) <= max(STEPS, step)
    assert start.ramp is None


def test_a_checkpoint_counts_for_a_rule_with_and_without_adascale_as_the_recipes_examples() -> None:
    """100 of the recipe's steps are 25 with four times its batch."""
    linear = replace(BASE, global_batch_size=4 * B, train_steps=STEPS // 4, ada_scale_batch_size=None)
    adaptive = replace(BASE, global_batch_size=4 * B)
    kept = document(Start(), 10, Position(), 0.1, linear, NumericalHealth())
    start = continued_start(kept, adaptive, 1, 2)
    assert (start.step, start.gained) == (10, Gained(B, steps=40.0))
    kept = document(Start(), 21, Position(), 0.1, adaptive, NumericalHealth()) | {
        "adaScale": {**asdict(Gained(B, 1.0, 2.0, 32.0, 0.5)), "step": 21}
    }
    start = continued_start(kept, linear, 1, 2)
    assert (start.step, start.gained) == (8, None)


class Own:
    """A task of which one part is its own."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __call__(self, hp: Any, rank: int) -> Task:
        return Task(model=tasks.Network(), train=tasks.examples(), loss=tasks.loss, **self.parts)


class RateOfItsOwn(Hooks):
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01


REFUSED = {
    "another optimizer": (
        Own(optimizer=lambda parameters, hp: torch.optim.Adam(parameters)),
        {},
        "the task built Adam",
    ),
    "a scheduler of its own": (
        Own(scheduler=lambda optimizer, hp: torch.optim.lr_scheduler.LinearLR(optimizer)),
        {},
        "the task's own code sets it",
    ),
    "a rate of its own": (Own(hooks=RateOfItsOwn()), {}, "the task's own code sets it"),
    "one gradient": (Own(), {"replicas": 1}, "compares the gradients of several replicas"),
}


@pytest.mark.parametrize(("made", "layout", "says"), REFUSED.values(), ids=REFUSED)
def test_what_adascale_is_not_made_for_is_refused(made: Own, layout: dict[str, int], says: str) -> None:
    ran = trained(**{"replicas": 2, **layout}, made=made)
    assert ran.outcome.code is ExitCode.UserError
    assert "recipe.scaling.learningRate: AdaScale" in ran.outcome.message
    assert says in ran.outcome.message


def test_a_sgd_of_the_tasks_own_keeps_the_proportions_of_its_groups() -> None:
    def optimizer(parameters: list[nn.Parameter], hp: Any) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:1], "lr": hp.learning_rate / 2}, {"params": parameters[1:]}]
        return torch.optim.SGD(groups, lr=hp.learning_rate)

    rates = []

    class Watching(Hooks):
        def before_update(self, optimizer: torch.optim.Optimizer) -> None:
            rates.append([float(group["lr"]) for group in optimizer.param_groups])

    trained(2, 2, made=Own(optimizer=optimizer, hooks=Watching()))
    assert all(second == pytest.approx(2 * first) for first, second in rates)
    assert len({first for first, _ in rates}) > 5


def test_the_host_never_reads_a_rate_that_is_on_the_device() -> None:
    """A tensor of the meta device has no value to read."""
    setter = LearningRateSetter(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=BASE.learning_rate), BASE)
    for step in range(3):
        setter.set(step, torch.empty((), device="meta"))
        assert setter.current == setter.rate_after(step + 1) == BASE.learning_rate
        assert setter.state()["present"] == [BASE.learning_rate]
