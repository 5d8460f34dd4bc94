"""What Lightning keeps of a run, as this job's checkpoints store it, and back.

Lightning makes one nested object of model, optimizers, schedulers, callbacks and loops, and pickles it. Here its
tensors go into safetensors and the rest into JSON, with a mark where Python has kinds that JSON lacks: tuples, and
dicts whose keys are not text. The module's weights have the same file and names as in every other checkpoint.

Callbacks and schedulers may keep what is none of that, such as a function. Before the first step it is refused. Later,
when hours of training would be lost, it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from tpu_trainer.checkpoint.snapshot import LIGHTNING, Snapshot, copy_to_host, is_storable, put_together, take_apart
from tpu_trainer.contract.errors import UserCodeError

_WEIGHTS = "state_dict"
_OPTIMIZERS = "optimizer_states"
_DROPPED = (
    "hparams_name",
    "hyper_parameters",
    "hparams_type",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
)
"""The module's own arguments: the entrypoint gives them again, and they may be objects of any kind."""

_ITEMS, _TUPLE = "$items", "$tuple"


def check_state(state: Mapping[str, Any], module: nn.Module) -> None:
    """`state`: Lightning's checkpoint before the first step.

    Raises:
        UserCodeError: it holds something that is neither a tensor nor a plain value; the text names the place.
    """
    left_out: list[str] = []
    kept_of(_rest(state), left_out.append)
    if left_out:
        raise UserCodeError(
            f"a checkpoint cannot keep what Lightning keeps of the run: at {left_out[0]}, where plain values and dense "
            "tensors can be kept. A callback's state_dict() and on_save_checkpoint may leave out what is the same in "
            "every attempt"
        )
    _unique(state.get(_WEIGHTS, {}), module)


def snapshot_of_state(
    state: Mapping[str, Any],
    module: nn.Module,
    step: int,
    examples: int,
    document: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Snapshot:
    """`state`: Lightning's checkpoint. Copies everything, so that training can go on at once. `tell`: is told what of
    callbacks and schedulers is neither a tensor nor a plain value, and so is left out.

    Raises:
        UserCodeError: so is something of the weights or of the optimizers; the text names the place.
    """

    def left_out(place: str) -> None:
        tell(f"checkpoints leave out {place}, which they cannot keep: a run that continues begins with a fresh one")

    weights, names = _unique(state.get(_WEIGHTS, {}), module)
    rest = kept_of(_rest(state), left_out)
    optimizers, of_optimizers = take_apart(marked(state.get(_OPTIMIZERS)), "the optimizers' state")
    others, of_others = take_apart(marked(rest), "what Lightning keeps of the run")
    live = {"model": weights, "optimizer": of_optimizers, "hooks": of_others}
    trees = {"optimizer": optimizers, "hooks": {"names": names, "rest": others}}
    version = str(state.get("pytorch-lightning_version", ""))
    return Snapshot(step, examples, {**document, LIGHTNING: version}, trees, copy_to_host(live))


def state_of_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """The inverse of `snapshot_of_state`, with tensors on the host."""
    kept = snapshot.trees["hooks"]
    state: dict[str, Any] = unmarked(put_together(kept["rest"], snapshot.tensors["hooks"]))
    optimizers = put_together(snapshot.trees["optimizer"], snapshot.tensors["optimizer"])
    weights = snapshot.tensors["model"]
    return {
        **state,
        _OPTIMIZERS: unmarked(optimizers),
        _WEIGHTS: {name: weights[first] for name, first in kept["names"].items()},
    }


def kept_of(value: Any, leave_out: Callable[[str], None]) -> Any:
    """Returns `value` without the entries of its dicts that hold anything else than tensors and plain values; each is
    told by its place and kind."""

    def walk(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            kept = {}
            for key, item in value.items():
                try:
                    kept[walk(key, place)] = walk(item, f"{place}/{key}")
                except _UnfitError as unfit:
                    leave_out(str(unfit))
            return kept
        if isinstance(value, list):
            return [walk(item, f"{place}/{at}") for at, item in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(walk(item, f"{place}/{at}") for at, item in enumerate(value))
        plain = value is None or isinstance(value, bool | int | float | str | np.generic)
        if not plain and not (isinstance(value, Tensor) and is_storable(value)):
            raise _UnfitError(f"{place} (a {type(value).__name__})")
        return value

    return walk(value, "")


class _UnfitError(Exception):
    """The place and kind of what a checkpoint cannot keep."""


def _rest(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the loops, callbacks, schedulers and hooks keep."""
    return {key: value for key, value in state.items() if key not in (_WEIGHTS, _OPTIMIZERS, *_DROPPED)}


def marked(value: Any) -> Any:
    """`value` in dicts with text keys and lists, for `take_apart`."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: marked(item) for key, item in value.items()}
        return {_ITEMS: [[marked(key), marked(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [marked(item) for item in value]}
    if isinstance(value, list):
        return [marked(item) for item in value]
    # Callbacks compare metrics with numpy's numbers.
    return value.item() if isinstance(value, np.generic) else value


def unmarked(value: Any) -> Any:
    """The inverse of `marked`."""
    if isinstance(value, list):
        return [unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ITEMS in value:
        return {unmarked(key): unmarked(item) for key, item in value[_ITEMS]}
    if _TUPLE in value:
        return tuple(unmarked(item) for item in value[_TUPLE])
    return {key: unmarked(item) for key, item in value.items()}


def _unique(state: Mapping[str, Any], module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights to store, and for each name in `state` the one that its weight is stored under: a weight that is used
    in several places has the name of the first."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    live = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UserCodeError(
                f"a checkpoint cannot keep the module: {name} of its state_dict() must be a tensor, got "
                f"{type(value).__name__}"
            )
        shared = isinstance(live.get(name), nn.Parameter)
        names[name] = first.setdefault(id(live[name]), name) if shared else name
    return {name: state[name] for name in dict.fromkeys(names.values())}, names
