"""What a job must come to: plain PyTorch, written from the documentation, one replica after the other in one process.

In float64 if the job computes in float32, else in the job's own precision, on the same parts of a batch.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.crossings import legs as made
from tests.trainer.crossings import task
from tests.trainer.crossings.features import Case
from tests.trainer.crossings.legs import Leg
from tests.trainer.crossings.task import Changing, Model
from tpu_trainer.data.order import permutation


@dataclass
class Ended:
    """What a run leaves. losses: by step, None where it is not finite. rates: of the groups, by step. evaluations: the
    metric by step. weights: parameters and rank 0's buffers. state: of the optimizer, by the checkpoint's names."""

    losses: dict[int, float | None] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Training:
    """Where a job stands. buffers: by replica. built: the rate that each group was built with. variance, mean, gained:
    AdaScale's averages, and the sum of its gains."""

    model: Model
    hooks: Changing
    optimizer: torch.optim.Optimizer
    built: list[float]
    average: dict[str, Tensor]
    buffers: list[dict[str, Tensor]]
    examples: int = 0
    epoch: int = 0
    offset: int = 0
    best: float | None = None
    waited: int = 0
    reduction: float = 1.0
    last_rate: float = 0.0
    variance: float = 0.0
    mean: float = 0.0
    gained: float = 0.0
    gain: float = 1.0


def expected(case: Case) -> list[Ended]:
    """Returns what each run of the case's job must leave."""
    torch.set_num_threads(1)
    first, *others = made.legs(case)
    training = _begun(first)
    kept, ended = _trained(first, training)
    return [ended, *(_trained(leg, kept)[1] for leg in others)]


def _begun(leg: Leg) -> Training:
    case = leg.case
    torch.manual_seed(made.SEED)
    model = Model(case)
    kind = {"Float32": torch.float64, "BFloat16": torch.bfloat16}.get(case.precision, torch.float32)
    model = model.to(kind)
    hooks = Changing(case, model)
    hooks.optimizer = optimizer = _optimizer(case, task.groups(case, model, leg.rate), leg.rate)
    precise = torch.float64 if kind == torch.float64 else torch.float32
    average = {name: value.detach().to(precise) for name, value in model.named_parameters() if value.requires_grad}
    # A copy where `to` makes none.
    average = {name: value.clone() for name, value in average.items()} if case.average == "ema" else {}
    buffers = [_buffers(model) for _ in range(leg.replicas)]
    return Training(model, hooks, optimizer, [group["lr"] for group in optimizer.param_groups], average, buffers)


def _trained(leg: Leg, now: Training) -> tuple[Training, Ended]:
    """Trains to the end of the leg; returns a copy of what was after its step `saved`, too."""
    case, ended, kept = leg.case, Ended(), now
    steps, start = leg.steps, now.examples // leg.batch
    if leg.adaptive and not leg.first and leg.batch != made.legs(case)[0].batch:
        start = int(now.gained * made.RECIPE_BATCH) // leg.batch
    now = copy.deepcopy(now)
    _continue(leg, now)
    ramp = 1.0
    if not leg.first and case.schedule != "Own" and not leg.adaptive and leg.batch != made.legs(case)[0].batch:
        new = leg.rate * now.reduction * _factor(leg, start)
        # As documented, at most a twentieth of the steps that are left: one.
        ramp = (now.last_rate + new) / 2 / new if 0 < now.last_rate < new else 1.0
    for step in range(start + 1, steps + 1):
        here = now.reduction * _factor(leg, step - 1) * (ramp if step == start + 1 else 1.0)
        loss = _step(leg, now, step, here)
        ended.losses[step] = loss if math.isfinite(loss) else None
        ended.rates[step] = [group["lr"] for group in now.optimizer.param_groups]
        now.last_rate = leg.rate * here
        every, last = leg.scaled(made.EVERY), step == steps or (leg.adaptive and now.gained >= steps)
        if case.evaluation == "evaluated" and (step % every == 0 or last):
            ended.evaluations[step] = _evaluated(leg, now)
        if leg.first and step == leg.saved:
            kept = copy.deepcopy(now)
        if last:
            break
    ended.weights = {name: value.detach() for name, value in now.model.named_parameters()} | now.buffers[0]
    ended.average = now.average
    state = now.optimizer.state_dict()["state"]
    ended.state = {
        f"/{number}/{name}": value
        for number, each in state.items()
        for name, value in each.items()
        if isinstance(value, Tensor)
    }
    return kept, ended


def _continue(leg: Leg, now: Training) -> None:
    """Every replica continues with rank 0's buffers; rates that the job has by its recipe are scaled anew."""
    now.buffers = [{name: value.clone() for name, value in now.buffers[0].items()} for _ in range(leg.replicas)]
    base = now.built[-1] if leg.case.groups == "two" else now.built[0]
    kept = now.built[1:] if leg.case.groups == "added" and leg.case.schedule == "Own" else []
    now.built = [rate * leg.rate / base for rate in now.built]
    now.built[1:] = kept or now.built[1:]
    now.optimizer.defaults["lr"] = leg.rate


def _step(leg: Leg, now: Training, step: int, factor: float) -> float:
    """Makes one step with `factor` times the built rates, if it is finite; returns its loss."""
    case, model = leg.case, now.model
    batch = _next(leg, now)
    before = copy.deepcopy(now.buffers)
    total, weight, squares = 0.0, 0.0, 0.0
    gradients: dict[nn.Parameter, Tensor] = {}
    precise = _precise(next(model.parameters()).dtype)
    terms, passes = len(now.buffers), leg.accumulation
    if case.way == "spmd":
        terms = 1
    now.hooks.step_begins(None, step)
    _share(case, now)
    now.built += [group["lr"] for group in now.optimizer.param_groups[len(now.built) :]]
    for replica in range(terms):
        _put(model, now.buffers[replica])
        own: dict[nn.Parameter, Tensor] = {}
        for number in range(passes):
            rows = _rows(batch, replica * passes + number, terms * passes)
            variance = _running_variance(model)
            with _casting(case):
                given = task.loss(case, model, rows)
            # A mean weighs as one example.
            value, share = given if isinstance(given, tuple) else (given / passes, torch.tensor(1.0 / passes))
            model.zero_grad()
            value.backward()
            if variance is not None and case.way in ("xla", "chips", "spmd"):
                _keep_the_biased_variance(model, variance, len(rows[1]))
            total, weight = total + value.item(), weight + share.item()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    if any(parameter is each for group in now.optimizer.param_groups for each in group["params"]):
                        squares += float((parameter.grad.to(precise) / share).square().sum())
                    own[parameter] = own.get(parameter, 0.0) + parameter.grad.to(precise)
        now.buffers[replica] = _buffers(model)
        for parameter, gradient in own.items():
            gradients[parameter] = gradients.get(parameter, 0.0) + gradient
    model.zero_grad()
    # What a hook has frozen has no gradient; what is in no group is not trained.
    groups = [parameter for group in now.optimizer.param_groups for parameter in group["params"]]
    trained = [each for each in groups if each in gradients and each.requires_grad]
    for parameter in trained:
        parameter.grad = (gradients[parameter] / weight).to(parameter.dtype)
    if leg.adaptive:
        factor = _adaptive(leg, now, squares / (terms * passes), terms * passes, trained)
    for number, (group, rate) in enumerate(zip(now.optimizer.param_groups, now.built, strict=True)):
        # A task's scheduler has a rate for each group that it was made with.
        group["lr"] = rate if number and case.schedule == "Own" and case.groups == "added" else rate * factor
    loss = total / weight
    if math.isfinite(loss) and all(parameter.grad.isfinite().all() for parameter in trained):
        _update(case, now, trained)
        now.gained += now.gain
    else:
        now.buffers = before
    model.zero_grad()
    now.hooks.after_step(None, torch.tensor(loss), step)
    now.examples += leg.batch
    return loss


def _adaptive(leg: Leg, now: Training, own: float, groups: int, trained: list[nn.Parameter]) -> float:
    """Returns AdaScale's factor of the rate. `own`: the mean squared length of the gradients of `groups` passes."""
    k = leg.batch / made.RECIPE_BATCH
    common = sum(float(parameter.grad.double().square().sum()) for parameter in trained)
    variance = (own - common) * k / (groups - 1)
    if math.isfinite(variance):
        share = k / 1000
        now.variance += share * (variance - now.variance)
        now.mean += share * (common - variance / k - now.mean)
    noise, signal = max(now.variance, 0.0), max(now.mean, 0.0)
    now.gain = (noise + signal) / (noise / k + signal) if noise + signal else 1.0
    return now.gain * now.reduction * _factor(leg, math.floor(now.gained))


def _update(case: Case, now: Training, trained: list[nn.Parameter]) -> None:
    task.RATES.seen = {}
    now.hooks.before_update(now.optimizer)
    if case.clip == "clipped":
        length = torch.stack([parameter.grad.double().square().sum() for parameter in trained]).sum().sqrt()
        for parameter in trained:
            parameter.grad.mul_((made.CLIP / (length + 1e-6)).clamp(max=1.0).to(parameter.dtype))
    now.optimizer.step()
    if case.average == "own":
        return
    for name, parameter in now.model.named_parameters():
        held = now.average.get(name)
        if held is not None:
            held.mul_(made.AVERAGE).add_(parameter.detach().to(held.dtype), alpha=1 - made.AVERAGE)
        elif parameter.requires_grad:
            now.average[name] = parameter.detach().to(_precise(parameter.dtype), copy=True)


def _share(case: Case, now: Training) -> None:
    """Buffers that the step may read are rank 0's at its start; what a batch norm in training only writes, is not."""
    if case.buffers == "centre" or not now.model.middle.training:
        now.buffers = [{name: value.clone() for name, value in now.buffers[0].items()} for _ in now.buffers]


def _factor(leg: Leg, step: int) -> float:
    """Returns the rate of step `step`, counted from 0, over the recipe's."""
    steps, case = leg.steps, leg.case
    if case.schedule == "Own":
        return 0.9**step
    warmup = 0 if case.schedule == "Constant" else leg.counted(made.WARMUP)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    if case.schedule == "Cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if case.schedule == "Linear":
        return 1 - done
    if case.schedule == "Step" and step >= leg.counted(made.MILESTONE):
        return made.DROP
    return 1.0


def _evaluated(leg: Leg, now: Training) -> float:
    """Returns the metric of the averaged weights, with rank 0's buffers, and lowers the rate on a plateau."""
    model, case = now.model, leg.case
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    modes = {module: module.training for module in model.modules()}
    _put(model, now.buffers[0])
    _put(model, now.average)
    model.eval()
    features, labels = task.held_out().tensors
    with torch.no_grad(), _casting(case):
        value = task.losses(model, (features.to(_input(case)), labels)).double().mean().item()
    for module, mode in modes.items():
        module.training = mode
    _put(model, own)
    if case.schedule == "Plateau":
        better = now.best is None or value > now.best
        now.best, now.waited = (value, 0) if better else (now.best, now.waited + 1)
        if now.waited >= made.PATIENCE:
            now.reduction, now.waited = now.reduction * made.DROP, 0
    return value


def _next(leg: Leg, now: Training) -> tuple[Tensor, Tensor]:
    """Returns the next global batch: what is left over of an epoch is dropped."""
    if now.offset + leg.batch > task.EXAMPLES:
        now.epoch, now.offset = now.epoch + 1, 0
    order = permutation(task.EXAMPLES, made.SEED, now.epoch)
    features, labels = task.data().tensors
    if leg.case.broken != "finite":
        features[made.broken(leg.case), 0] = task.BAD
    rows = torch.tensor(order[now.offset : now.offset + leg.batch])
    now.offset += leg.batch
    return features[rows].to(_input(leg.case)), labels[rows]


def _rows(batch: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Returns one of so many equal parts of a batch."""
    features, labels = (tensor.chunk(parts)[part] for tensor in batch)
    return features, labels


def _optimizer(case: Case, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": rate, "weight_decay": task.DECAY}
    match case.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, momentum=task.MOMENTUM, **options)
        case "lion":
            return Lion(groups, options)
        case name:
            if name == "adafactor" and case.precision == "Float32":
                # Its default is that of the weights' type, which is wider here.
                options["eps"] = (torch.finfo(torch.float32).eps, 1e-3)
            kinds = {kind.lower(): kind for kind in ("AdamW", "RMSprop", "Adafactor", "Adagrad", "NAdam")}
            optimizer: torch.optim.Optimizer = getattr(torch.optim, kinds[name])(groups, **options)
            return optimizer


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2, with the usual betas of 0.9 and 0.99."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to(_precise(parameter.dtype))
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(gradient))
                direction = torch.sign(0.9 * average + 0.1 * gradient)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_((group["lr"] * direction).to(parameter.dtype))
                average.copy_(0.99 * average + 0.01 * gradient)


def _running_variance(model: Model) -> Tensor | None:
    norm = model.middle
    return norm.running_var.clone() if isinstance(norm, nn.BatchNorm1d) and norm.training else None


def _keep_the_biased_variance(model: Model, before: Tensor, rows: int) -> None:
    """As torch_xla does: the running variance takes in a batch's biased one. `before`: the variance before the pass."""
    old = before * (1 - model.middle.momentum)
    model.middle.running_var.copy_(old + (model.middle.running_var - old) * (rows - 1) / rows)


def _casting(case: Case) -> AbstractContextManager[None]:
    mixed = case.precision == "BFloat16Mixed"
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False) if mixed else nullcontext()


def _input(case: Case) -> torch.dtype:
    return {"Float32": torch.float64, "BFloat16": torch.bfloat16}.get(case.precision, torch.float32)


def _precise(kind: torch.dtype) -> torch.dtype:
    return torch.float64 if kind == torch.float64 else torch.float32


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}


@torch.no_grad()
def _put(model: nn.Module, values: dict[str, Tensor]) -> None:
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in values.items():
        places[name].copy_(value)
