"""Converts Lightning's state of a run to a snapshot of this job's checkpoints, and back.

Lightning pickles model, optimizers, schedulers, callbacks and loops as one nested object. Here its tensors go into
safetensors and the rest into JSON, with a mark for what JSON lacks: tuples, and dicts whose keys are not text. The
module's weights have the same file and names as in every other checkpoint.

Callbacks and schedulers may keep other objects, such as a function. Before the first step they are refused; later, when
hours of training would be lost, they are left out.
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
"""The arguments of the module, which may be any objects: the entrypoint passes them again."""

_ITEMS, _TUPLE = "$items", "$tuple"

HERE = "the state of this run"
"""The path under which Lightning saves and finds the state that goes into this job's own checkpoints."""


def check_state(state: Mapping[str, Any], module: nn.Module) -> None:
    """Raises UserCodeError, with the place, for anything in Lightning's checkpoint that cannot be stored; called before
    the first step."""
    left_out: list[str] = []
    storable_part(_rest(state), left_out.append)
    if left_out:
        raise UserCodeError(
            f"a checkpoint cannot keep Lightning's state of the run: at {left_out[0]}, where only plain values and "
            "dense tensors can be kept. Let state_dict() or on_save_checkpoint of the callback leave out what is the "
            "same in every attempt"
        )
    _unique_weights(state.get(_WEIGHTS, {}), module)


def snapshot_of_state(
    state: Mapping[str, Any],
    module: nn.Module,
    step: int,
    examples: int,
    document: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Snapshot:
    """Copies `state`, Lightning's checkpoint, so that training can go on at once. `warn` takes one text for each entry
    of callbacks and schedulers that cannot be stored and is left out.

    Raises:
        UserCodeError: weights or optimizers hold such an entry; the text names the place.
    """

    def left_out(place: str) -> None:
        warn(f"checkpoints cannot keep {place} and leave it out: a resumed run begins with a fresh one")

    weights, names = _unique_weights(state.get(_WEIGHTS, {}), module)
    rest = storable_part(_rest(state), left_out)
    optimizers, optimizer_tensors = take_apart(mark(state.get(_OPTIMIZERS)), "the optimizers' state")
    others, other_tensors = take_apart(mark(rest), "Lightning's state of the run")
    live = {"model": weights, "optimizer": optimizer_tensors, "hooks": other_tensors}
    trees = {"optimizer": optimizers, "hooks": {"names": names, "rest": others}}
    version = str(state.get("pytorch-lightning_version", ""))
    return Snapshot(step, examples, {**document, LIGHTNING: version}, trees, copy_to_host(live))


def state_of_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Inverts `snapshot_of_state`; tensors are on the host."""
    kept = snapshot.trees["hooks"]
    state: dict[str, Any] = unmark(put_together(kept["rest"], snapshot.tensors["hooks"]))
    optimizers = put_together(snapshot.trees["optimizer"], snapshot.tensors["optimizer"])
    weights = snapshot.tensors["model"]
    return {
        **state,
        _OPTIMIZERS: unmark(optimizers),
        _WEIGHTS: {name: weights[first] for name, first in kept["names"].items()},
    }


def storable_part(value: Any, leave_out: Callable[[str], None]) -> Any:
    """Returns `value` without the dict entries that hold anything but tensors and plain values. `leave_out` takes the
    place and kind of each."""

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
    """Returns the state of loops, callbacks, schedulers and hooks."""
    return {key: value for key, value in state.items() if key not in (_WEIGHTS, _OPTIMIZERS, *_DROPPED)}


def mark(value: Any) -> Any:
    """Returns `value` as lists and dicts with text keys, for `take_apart`."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: mark(item) for key, item in value.items()}
        return {_ITEMS: [[mark(key), mark(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [mark(item) for item in value]}
    if isinstance(value, list):
        return [mark(item) for item in value]
    # Callbacks compare metrics with numpy's numbers.
    return value.item() if isinstance(value, np.generic) else value


def unmark(value: Any) -> Any:
    """Inverts `mark`."""
    if isinstance(value, list):
        return [unmark(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ITEMS in value:
        return {unmark(key): unmark(item) for key, item in value[_ITEMS]}
    if _TUPLE in value:
        return tuple(unmark(item) for item in value[_TUPLE])
    return {key: unmark(item) for key, item in value.items()}


def _unique_weights(state: Mapping[str, Any], module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the weights to store, and for each name in `state` the name under which its weight is stored: a weight
    used in several places has the name of the first."""
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
