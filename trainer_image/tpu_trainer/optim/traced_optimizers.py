"""torch's SGD, Adam, AdamW and RMSprop for XLA devices, traced in a tenth of the time.

torch's own update one parameter after the other, in place, with rate and bias correction as Python numbers. Before
torch_xla 2.9 traces an operation in place, torch infers its shapes once more, in Python; and numbers that change must
be kept from changing the program (`scalars_as_data`). Here one call traces an operation for all parameters of a group,
out of place, and the numbers of a step reach the device as one small tensor: as data, whatever values they take.

Options, state and state dicts are torch's, and so are the results to within rounding. 16-bit weights are updated in
float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tpu_trainer.gang.backends.base import as_complex, as_real

Group = dict[str, Any]
State = dict[str, Any]
Tensors = tuple[Tensor, ...] | list[Tensor]
Numbers = dict[str, Any]
"""The numbers of a step by name: floats, or tensors on the device, as the rate that AdaScale sets."""


@dataclass
class _Bundle:
    """Parameters of one group that have a gradient, and are of one type.

    begins: none of them has had a momentum. places: the parameters' numbers in the optimizer, which stay when a divided
    optimizer puts parts in their place. rows: for each of them, which of the step's rows of numbers it uses.
    """

    group: Group
    begins: bool
    parameters: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, parameter: Tensor, state: State, place: int) -> None:
        self.parameters.append(parameter)
        self.states.append(state)
        self.places.append(place)

    @property
    def kind(self) -> torch.dtype:
        """The type of the numbers: the parameters' own where the arithmetic is done in it."""
        return torch.float64 if self.parameters[0].dtype in (torch.float64, torch.complex128) else torch.float32

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def of(self, key: str) -> list[Tensor]:
        return [state[key] for state in self.states]

    def read(self, key: str) -> Tensors:
        return _widen(self.of(key))

    def write(self, key: str, values: Tensors) -> None:
        _write(self.of(key), values)


class TracedOptimizer(Optimizer):
    """What the four have in common; each derives from this class and from torch's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cohorts: dict[int, int] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for before in (*_global_optimizer_pre_hooks.values(), *self._optimizer_step_pre_hooks.values()):
            before(self, (), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call]
                loss = closure()
        self._make_step()
        for after in (*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            after(self, (), {})
        return loss

    # Otherwise torch wraps it, to do the same and to note each step for its profiler, which costs more than a group.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _make_step(self) -> None:
        bundles, rows, kinds = list(self._bundles()), list[Numbers](), list[torch.dtype]()
        for bundle in bundles:
            rows += self._rows(bundle, len(rows))
            kinds += [bundle.kind] * (len(rows) - len(kinds))
        sent = _send(rows, kinds, bundles[0].parameters[0].device) if bundles else []
        for bundle in bundles:
            parameters, gradients = _widen(bundle.parameters), _widen(bundle.gradients)
            if bundle.group["maximize"]:
                gradients = torch._foreach_neg(gradients)
            _write(bundle.parameters, self._update(bundle, parameters, gradients, self._tensors(bundle, sent)))

    def _missing(self, parameter: Tensor, group: Group, state: State) -> State:
        """Returns what the parameter's state lacks in its first step, as torch makes it."""
        raise NotImplementedError

    def _numbers(self, group: Group) -> Numbers:
        """Returns the numbers of a step that do not depend on how many the parameter has made."""
        raise NotImplementedError

    def _correct(self, numbers: Numbers, count: Any) -> Numbers:
        """Returns the numbers of a parameter's step number `count`; or, on the device, of several parameters'."""
        return numbers

    def _update(self, bundle: _Bundle, parameters: Tensors, gradients: Tensors, at: dict[str, Tensors]) -> Tensors:
        """Updates the state. Returns the new values of the parameters. `at`: each number's tensor for each of them."""
        raise NotImplementedError

    def _bundles(self) -> Iterator[_Bundle]:
        place = 0
        for group in self.param_groups:
            alike: dict[Any, _Bundle] = {}
            for parameter in group["params"]:
                place += 1
                if parameter.grad is None:
                    continue
                state = self.state.get(parameter, {})
                begins = state.get("momentum_buffer") is None
                if missing := self._missing(parameter, group, state):
                    state = self.state[parameter]
                    state.update(missing)
                alike.setdefault((parameter.dtype, begins), _Bundle(group, begins)).add(parameter, state, place)
            yield from alike.values()

    def _rows(self, bundle: _Bundle, first: int) -> list[Numbers]:
        """Counts the step where the host does, and returns the bundle's rows, the first of which gets the number
        `first`."""
        numbers = self._numbers(bundle.group)
        if not _counts_on_host(bundle):
            bundle.rows = [first] * len(bundle.parameters)
            return [numbers]
        torch._foreach_add_(bundle.of("step"), 1.0)
        counts = [float(step) for step in bundle.of("step")]
        cohorts = self._assign(bundle.places, counts)
        count_of = dict(zip(cohorts, counts, strict=True))
        row_of = {cohort: first + number for number, cohort in enumerate(count_of)}
        bundle.rows = [row_of[cohort] for cohort in cohorts]
        return [self._correct(numbers, count) for count in count_of.values()]

    def _assign(self, places: Sequence[int], counts: Sequence[float]) -> list[int]:
        """Returns a number for each parameter, by which those that have made equally many steps share a row.

        Parameters that were apart once stay apart, also when their counts meet, which would make another program.
        """
        assigned: dict[tuple[int, float], int] = {}
        for place, count in zip(places, counts, strict=True):
            before = self._cohorts.get(place, 0)
            if (before, count) not in assigned:
                is_taken = before in assigned.values()
                assigned[before, count] = max(*self._cohorts.values(), *assigned.values()) + 1 if is_taken else before
            self._cohorts[place] = assigned[before, count]
        return [self._cohorts[place] for place in places]

    def _tensors(self, bundle: _Bundle, sent: Sequence[Numbers]) -> dict[str, Tensors]:
        """Returns for each number the tensors that the parameters use. Counts the step where the device does."""
        if "step" not in bundle.states[0] or _counts_on_host(bundle):
            return {name: [sent[row][name] for row in bundle.rows] for name in sent[bundle.rows[0]]}
        # There a step that is not finite can be undone.
        counts = torch.stack(bundle.of("step")) + 1
        bundle.write("step", counts.unbind())
        numbers = self._correct(sent[bundle.rows[0]], counts)
        count = len(bundle.parameters)
        return {name: number.unbind() if number.dim() else [number] * count for name, number in numbers.items()}


class SGD(TracedOptimizer, torch.optim.SGD):
    def _missing(self, parameter: Tensor, group: Group, state: State) -> State:
        has_all = not group["momentum"] or state.get("momentum_buffer") is not None
        return {} if has_all else _zeros(parameter, ["momentum_buffer"])

    def _numbers(self, group: Group) -> Numbers:
        return {
            "rate": -_rate(group),
            "decay": float(group["weight_decay"]),
            "momentum": float(group["momentum"]),
            "share": 1 - float(group["dampening"]),
        }

    def _update(self, bundle: _Bundle, parameters: Tensors, gradients: Tensors, at: dict[str, Tensors]) -> Tensors:
        group = bundle.group
        if group["weight_decay"]:
            gradients = torch._foreach_addcmul(gradients, parameters, at["decay"])
        if group["momentum"]:
            if bundle.begins:
                # The first momentum is the gradient, but a buffer that were the same tensor would share its memory.
                momenta: Tensors = [gradient.clone() for gradient in gradients]
            else:
                added = torch._foreach_mul(gradients, at["share"]) if group["dampening"] else gradients
                momenta = torch._foreach_addcmul(added, bundle.read("momentum_buffer"), at["momentum"])
            bundle.write("momentum_buffer", momenta)
            gradients = torch._foreach_addcmul(gradients, momenta, at["momentum"]) if group["nesterov"] else momenta
        return torch._foreach_addcmul(parameters, gradients, at["rate"])


class Adam(TracedOptimizer, torch.optim.Adam):
    def _missing(self, parameter: Tensor, group: Group, state: State) -> State:
        if state:
            return {}
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        return {"step": _count(parameter, group), **_zeros(parameter, names)}

    def _numbers(self, group: Group) -> Numbers:
        rate, decay, (beta1, beta2) = _rate(group), float(group["weight_decay"]), map(float, group["betas"])
        return {
            "rate": -rate,
            "decay": 1 - rate * decay if group["decoupled_weight_decay"] else decay,
            "share1": 1 - beta1,
            "share2": 1 - beta2,
            "log1": math.log(beta1) if beta1 else -math.inf,
            "log2": math.log(beta2) if beta2 else -math.inf,
            "eps": float(group["eps"]),
        }

    def _correct(self, numbers: Numbers, count: Any) -> Numbers:
        """Puts both bias corrections into the rate and epsilon, so that they cost no operation of a parameter's."""
        kept = dict(numbers)
        exponents = [count * kept.pop(name) for name in ("log1", "log2")]
        # Not 1 - beta ** count, which loses digits in float32.
        first, second = (-(torch.expm1(x) if isinstance(x, Tensor) else math.expm1(x)) for x in exponents)
        root = second**0.5
        return {**kept, "rate": kept["rate"] * (root / first), "eps": kept["eps"] * root}

    def _update(self, bundle: _Bundle, parameters: Tensors, gradients: Tensors, at: dict[str, Tensors]) -> Tensors:
        group = bundle.group
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            gradients = torch._foreach_addcmul(gradients, parameters, at["decay"])
        means = torch._foreach_lerp(bundle.read("exp_avg"), gradients, at["share1"])
        bundle.write("exp_avg", means)
        squares = torch._foreach_mul(gradients, gradients)
        squares = torch._foreach_lerp(bundle.read("exp_avg_sq"), squares, at["share2"])
        bundle.write("exp_avg_sq", squares)
        if group["amsgrad"]:
            squares = torch._foreach_maximum(bundle.read("max_exp_avg_sq"), squares)
            bundle.write("max_exp_avg_sq", squares)
        scales = torch._foreach_add(torch._foreach_sqrt(squares), at["eps"])
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            parameters = torch._foreach_mul(parameters, at["decay"])
        return torch._foreach_addcmul(parameters, torch._foreach_div(means, scales), at["rate"])


class AdamW(Adam, torch.optim.AdamW):
    """Adam, whose groups say that their decay is decoupled from the gradient."""


class RMSprop(TracedOptimizer, torch.optim.RMSprop):
    def _missing(self, parameter: Tensor, group: Group, state: State) -> State:
        if state:
            return {}
        names = ["square_avg", *(["momentum_buffer"] if group["momentum"] else [])]
        names += ["grad_avg"] if group["centered"] else []
        return {"step": _count(parameter, group), **_zeros(parameter, names)}

    def _numbers(self, group: Group) -> Numbers:
        return {
            "rate": -_rate(group),
            "decay": float(group["weight_decay"]),
            "share": 1 - float(group["alpha"]),
            "eps": float(group["eps"]),
            "momentum": float(group["momentum"]),
        }

    def _update(self, bundle: _Bundle, parameters: Tensors, gradients: Tensors, at: dict[str, Tensors]) -> Tensors:
        group = bundle.group
        if group["weight_decay"]:
            gradients = torch._foreach_addcmul(gradients, parameters, at["decay"])
        squares = torch._foreach_mul(gradients, gradients)
        squares = torch._foreach_lerp(bundle.read("square_avg"), squares, at["share"])
        bundle.write("square_avg", squares)
        if group["centered"]:
            means = torch._foreach_lerp(bundle.read("grad_avg"), gradients, at["share"])
            bundle.write("grad_avg", means)
            squares = torch._foreach_sub(squares, torch._foreach_mul(means, means))
        updates = torch._foreach_div(gradients, torch._foreach_add(torch._foreach_sqrt(squares), at["eps"]))
        if group["momentum"]:
            updates = torch._foreach_addcmul(updates, bundle.read("momentum_buffer"), at["momentum"])
            bundle.write("momentum_buffer", updates)
        return torch._foreach_addcmul(parameters, updates, at["rate"])


def _rate(group: Group) -> Any:
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)


def _count(parameter: Tensor, group: Group) -> Tensor:
    kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.zeros((), dtype=kind, device=parameter.device if group["capturable"] else "cpu")


def _zeros(parameter: Tensor, names: Sequence[str]) -> State:
    return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}


def _counts_on_host(bundle: _Bundle) -> bool:
    return "step" in bundle.states[0] and not bundle.group["capturable"]


def _send(rows: Sequence[Numbers], kinds: Sequence[torch.dtype], device: torch.device) -> list[Numbers]:
    """Returns the rows with tensors on the device in place of the floats; those of one type are sent together."""
    there = {}
    for kind in dict.fromkeys(kinds):
        alike = [row for row, other in zip(rows, kinds, strict=True) if other == kind]
        floats = [value for row in alike for value in row.values() if isinstance(value, float)]
        there[kind] = iter(_to_device(torch.tensor(floats, dtype=kind), device).unbind())
    return [
        {name: next(there[kind]) if isinstance(value, float) else value for name, value in row.items()}
        for row, kind in zip(rows, kinds, strict=True)
    ]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "xla":
        return tensor.to(device)
    import torch_xla.core.xla_model as xm

    # At once and to every device whole, as the backends send what is no batch.
    (sent,) = xm.send_cpu_data_to_device([tensor], device)
    return sent  # type: ignore[no-any-return]


def _widen(tensors: list[Tensor]) -> Tensors:
    """Returns what the arithmetic is done with: float32 for 16 bits, and pairs of real numbers for complex ones. The
    tensors are of one type."""
    if tensors[0].dtype in (torch.bfloat16, torch.float16):
        return [tensor.float() for tensor in tensors]
    return [as_real(tensor) for tensor in tensors] if tensors[0].is_complex() else tensors


def _write(targets: Tensors, values: Tensors) -> None:
    if targets[0].dtype == values[0].dtype:
        torch._foreach_copy_(targets, values)
    else:
        for target, value in zip(targets, values, strict=True):
            target.copy_(as_complex(value, target).to(target.dtype))
