"""The state of a run at one step: copies it to the host, stores it as files, and puts it back into a run.

Tensors are stored as safetensors and the rest as JSON, without pickles. Nested dicts and lists of both, such as an
optimizer's state, are taken apart: a tensor is stored under the path that leads to it, and JSON refers to the path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from tpu_contract.words import cut
from tpu_trainer.checkpoint.parts import WHOLE, CheckpointPart, Item, file_of
from tpu_trainer.contract.errors import UserCodeError, user_code

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.optim.sharding import OptimizerSharding

Tensors = Mapping[str, Tensor]

STORABLE = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64}
    | {torch.complex64}
)
"""The types that safetensors can hold."""

FILES = ("model", "optimizer", "hooks", "ema")
"""The files of tensors; "ema" holds the averaged weights of a run that averages them."""

STATE = "state.json"
_REFERENCE = "$tensor"

LIGHTNING = "lightning"
"""The key of a document that was written under Lightning's own Trainer; its value is Lightning's version."""


@dataclass(frozen=True)
class Snapshot:
    """step: steps of the present recipe that are done. examples: seen by the job so far, over all its slices.

    document: what the run keeps besides its tensors, as JSON. trees: the optimizer's and the hooks' state without their
    tensors. tensors: copies on the host, by the file they belong to, one of FILES. part: which part of the checkpoint
    the tensors are; other hosts hold the other parts.
    """

    step: int
    examples: int
    document: Mapping[str, Any]
    trees: Mapping[str, Any]
    tensors: Mapping[str, Tensors]
    part: CheckpointPart = WHOLE


@dataclass(frozen=True)
class LiveState:
    """The state of a run that a checkpoint copies.

    average: the averaged weights. sharding: how the optimizer's state is divided, if it is; each call that copies it is
    then a collective. together: all processes read the same tensors in the same order (Backend.reads_together).
    """

    model: nn.Module
    optimizer: Optimizer
    average: Tensors = field(default_factory=dict)
    sharding: OptimizerSharding | None = None
    together: bool = False

    def tensors(self, of_optimizer: Tensors, of_hooks: Tensors) -> dict[str, Tensors]:
        """Returns all tensors on their devices, by file."""
        return {
            "model": _unique_tensors(self.model),
            "optimizer": of_optimizer,
            "hooks": of_hooks,
            "ema": self.average,
        }


def take_snapshot(
    run: LiveState,
    hooks_state: Mapping[str, Any],
    step: int,
    examples: int,
    document: Mapping[str, Any],
    elsewhere: Collection[Item] = (),
    part: CheckpointPart = WHOLE,
) -> Snapshot:
    """Copies everything but `elsewhere`, which other hosts copy, so that training can go on at once. Leaves out the
    optimizer's parameter groups: rates come from the recipe, which may be a new one.

    If processes read together, every other one calls `take_part` meanwhile, and this one reads `elsewhere`, too, and
    drops it. Waits for the device, so call it at the end of a step: pending work would be computed for this copy alone.

    Raises:
        UserCodeError: the state holds something that a checkpoint cannot keep.
    """
    state, of_optimizer = take_apart(_optimizer_state(run.optimizer), "the optimizer's state")
    hooks, of_hooks = take_apart(hooks_state, "the state of the task's hooks")
    trees = {"optimizer": {**_optimizer_shape(run.optimizer), "state": state}, "hooks": hooks}
    tensors = _copy_wanted(run, run.tensors(of_optimizer, of_hooks), lambda item: item not in elsewhere)
    return Snapshot(step, examples, document, trees, tensors, part)


def take_part(run: LiveState, hooks_state: Mapping[str, Any], mine: Collection[Item]) -> dict[str, Tensors]:
    """Copies `mine` while another process takes the snapshot. Never holds more than that, what `sharding` gathers at a
    time, and one tensor in host memory."""
    _, of_hooks = take_apart(hooks_state, "the state of the task's hooks")
    return _copy_wanted(run, run.tensors(optimizer_tensors(run.optimizer), of_hooks), lambda item: item in mine)


def check_state(optimizer: Optimizer, hooks_state: Callable[[], Mapping[str, Any]]) -> None:
    """Refuses, before the first step, what no checkpoint could keep.

    Raises:
        UserCodeError: no checkpoint could keep the optimizer's state, or what the hooks keep by now.
    """
    with user_code("the optimizer's state_dict()"):
        known = optimizer.state_dict()
    if not (isinstance(known, Mapping) and {"state", "param_groups"} <= set(known)):
        raise UserCodeError(
            f"the optimizer {type(optimizer).__name__} cannot be kept in a checkpoint: its state_dict() must have "
            '"state" and "param_groups". One that is made of several others derives from torch.optim.Optimizer and has '
            "their groups and their state (docs/tasks.md)"
        )
    state: Mapping[str, Any] = {}
    # A hook may fail before the first step, for lack of something that a step makes. The first checkpoint reports it.
    with suppress(Exception):
        state = hooks_state()
    take_apart(state, "the state of the task's hooks")


def replicated_tensors(run: LiveState) -> dict[Item, Tensor]:
    """Returns the tensors that any host can store, on their devices: tensors that are equal in every replica, and,
    without values, tensors that are divided among the replicas. Buffers are not among them: each replica's batches
    change them."""
    of_optimizer: Tensors = optimizer_tensors(run.optimizer)
    if run.sharding is not None:
        of_optimizer = run.sharding.describe(of_optimizer)
    weights = {name: value for name, value in _unique_tensors(run.model).items() if isinstance(value, nn.Parameter)}
    files: dict[str, Tensors] = {"model": weights, "optimizer": of_optimizer, "ema": run.average}
    return {(file, name): tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def _copy_wanted(run: LiveState, live: Mapping[str, Tensors], wanted: Callable[[Item], bool]) -> dict[str, Tensors]:
    """Copies the `wanted` tensors to the host; reads all `live` ones for it if processes read together."""
    here = {
        file: {name: tensor for name, tensor in tensors.items() if wanted((file, name))}
        for file, tensors in live.items()
    }
    sharding = run.sharding
    gathered = {} if sharding is None else sharding.gather(live["optimizer"], here["optimizer"])
    if not run.together:
        return copy_to_host(here, gathered)
    divided: Collection[str] = () if sharding is None else sharding.parts(live["optimizer"])
    copies: dict[str, Tensors] = {}
    for file, tensors in live.items():
        stored: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            _check_storable(f"{file}: {name}", tensor)
            if file == "optimizer" and name in divided:
                if name in gathered:
                    stored[name] = gathered[name]
                continue
            (copy,) = _to_host([tensor])
            if name in here[file]:
                stored[name] = copy
        copies[file] = stored
    return copies


def copy_to_host(live: Mapping[str, Tensors], gathered: Tensors | None = None) -> dict[str, Tensors]:
    """Copies tensors to the host. `gathered`: tensors of the optimizer's state that are there already.

    Raises:
        UserCodeError: a checkpoint cannot keep one of them.
    """
    for file, tensors in live.items():
        for name, tensor in tensors.items():
            _check_storable(f"{file}: {name}", tensor)
    copies = {("optimizer", name): tensor for name, tensor in (gathered or {}).items()}
    rest = {
        (file, name): tensor
        for file, tensors in live.items()
        for name, tensor in tensors.items()
        if (file, name) not in copies
    }
    # One transfer for all: every transfer from a device costs a round trip.
    copies |= zip(rest, _to_host(list(rest.values())), strict=True)
    return {file: {name: copies[file, name] for name in tensors} for file, tensors in live.items()}


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the tensors of the optimizer's state by name ("/0/exp_avg"), on their devices."""
    return take_apart(_optimizer_state(optimizer), "the optimizer's state")[1]


def is_from_lightning(snapshot: Snapshot) -> bool:
    """Returns whether a run under Lightning's own Trainer wrote the snapshot; only such a run can continue it."""
    return LIGHTNING in snapshot.document


def fingerprint(model: nn.Module, entrypoint: str, seed: int) -> str:
    """Returns a hash that is equal for runs that can continue each other: same names, types and shapes of the model's
    tensors, same task, same seed. Depends on neither the recipe nor the slice. `model`: not yet on a device."""
    layout = {name: describe_tensor(tensor) for name, tensor in _unique_tensors(model).items()}
    text = json.dumps({"entrypoint": entrypoint, "seed": seed, "tensors": layout}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def restore_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Gives the model, which is still on the host, the snapshot's values, if the snapshot has them.

    Raises:
        UserCodeError: the snapshot is of another model; the text names the first difference.
    """
    stored, here = snapshot.tensors["model"], _unique_tensors(model)
    for name in sorted({*stored, *here}):
        there, now = (describe_tensor(tensors[name]) if name in tensors else "nothing" for tensors in (stored, here))
        if there != now:
            raise UserCodeError(
                f"the checkpoint of step {snapshot.step} does not fit the task's model: {name} is {there} in the "
                f"checkpoint and {now} in the model"
            )
    if any(tensor.is_meta for tensor in stored.values()):
        return
    with user_code("loading the checkpoint into the model"):
        first_names = {id(tensor): name for name, tensor in here.items()}
        state = model.state_dict(keep_vars=True)
        model.load_state_dict({name: stored[first_names.get(id(value), name)] for name, value in state.items()})


def restore_optimizer(snapshot: Snapshot, optimizer: Optimizer) -> None:
    """Gives the optimizer the snapshot's state, each tensor on its parameter's device and in the type it had.

    Step counts stay on the host, as in torch. For tensors without values (on the meta device) it gets empty tensors.

    Raises:
        UserCodeError: it is another optimizer, or for other parameters.
    """
    stored = snapshot.trees["optimizer"]
    for what, now in _optimizer_shape(optimizer).items():
        if stored[what] != now:
            raise UserCodeError(
                f"the checkpoint of step {snapshot.step} does not fit the optimizer: {what} "
                f"{cut(str(stored[what]), 100)} in the checkpoint, {cut(str(now), 100)} in this run"
            )
    copies = {
        name: with_memory(tensor) if tensor.is_meta else tensor.clone()
        for name, tensor in snapshot.tensors["optimizer"].items()
    }
    together = put_together(stored["state"], copies)
    state = {int(key) if key.isdigit() else key: value for key, value in together.items()}
    groups = optimizer.param_groups
    with user_code("loading the checkpoint into the optimizer"):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    # torch has replaced the groups with copies, and the code that sets the rates may hold the originals.
    optimizer.param_groups = groups
    _undo_casts(optimizer, state)


def with_memory(tensor: Tensor) -> Tensor:
    """Returns empty host memory for a tensor that has no values yet, and any other tensor unchanged."""
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor


def hooks_state(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the state of the task's hooks, with lists instead of tuples, and tensors on the host."""
    state: dict[str, Any] = put_together(snapshot.trees["hooks"], snapshot.tensors["hooks"])
    return state


def snapshot_files(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of each file, one at a time, so that only one is in memory besides the snapshot."""
    yield from tensor_files(snapshot.tensors, snapshot.part)
    state = {
        "step": snapshot.step,
        "examples": snapshot.examples,
        "document": snapshot.document,
        "trees": snapshot.trees,
    }
    yield STATE, json.dumps(state, indent=1).encode()


def tensor_files(tensors: Mapping[str, Tensors], part: CheckpointPart) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of each file that has tensors."""
    for file, named in tensors.items():
        if named:
            yield part.name(file), safetensors.torch.save(dict(named))


def weight_files(model: nn.Module, average: Tensors) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files that hold weights, for a run that keeps no checkpoints.

    Raises:
        UserCodeError: the model holds something that these files cannot keep.
    """
    for file, tensors in (("model", _unique_tensors(model)), ("ema", average)):
        for name, tensor in tensors.items():
            _check_storable(f"{file}: {name}", tensor)
        here = dict(zip(tensors, _to_host(list(tensors.values())), strict=True))
        yield from tensor_files({file: here}, WHOLE)


def parse_snapshot(names: Collection[str], read: Callable[[str], bytes]) -> Snapshot:
    """Inverts `snapshot_files`, over all parts. `names`: of all files. `read`: returns a file's content by its name."""
    tensors: dict[str, dict[str, Tensor]] = {file: {} for file in FILES}
    for name in sorted(names):
        if (file := file_of(name)) in tensors:
            tensors[file].update(safetensors.torch.load(read(name)))
    state = json.loads(read(STATE))
    return Snapshot(
        state["step"],
        state["examples"],
        state["document"],
        state["trees"],
        tensors,
    )


def take_apart(value: Any, what: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns the JSON value, and the tensors by path ("/0/exp_avg"). Tuples become lists. `what`: its name in errors.

    Raises:
        UserCodeError: something in it is neither JSON nor a tensor, or a key is not text; the text names the place.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {_REFERENCE: path}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [walk(item, _below(path, index)) for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            raise _unfit(what, path, f"JSON values and tensors can be kept, got {type(value).__name__}")
        for key in value:
            if not isinstance(key, str) or key == _REFERENCE:
                raise _unfit(what, path, f'keys must be text other than "{_REFERENCE}", got {key!r}')
        return {key: walk(item, _below(path, key)) for key, item in value.items()}

    return walk(value, ""), tensors


def put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverts `take_apart`."""
    if isinstance(value, list):
        return [put_together(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _REFERENCE in value:
        return tensors[value[_REFERENCE]]
    return {key: put_together(item, tensors) for key, item in value.items()}


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of the model's state; a weight that is used in several places has only its first name.

    Shared buffers have all their names: they do not stay shared on their way to a device.
    """
    with user_code("the model's state_dict()"):
        state = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    unique = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UserCodeError(
                f"a checkpoint cannot keep the model: {name} of its state_dict() must be a tensor, "
                f"got {type(value).__name__}"
            )
        if not (isinstance(value, nn.Parameter) and id(value) in seen):
            unique[name] = value
        seen.add(id(value))
    return unique


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    with user_code("the optimizer's state_dict()"):
        state = optimizer.state_dict()["state"]
    return {str(key): value for key, value in state.items()}


def _optimizer_shape(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what is equal in two optimizers that can load each other's state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {"class": type(optimizer).__name__, "parameters": [list(parameter.shape) for parameter in parameters]}


def _undo_casts(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Restores the types of floating-point state, which torch casts to the parameter's type: float32 moments of
    bfloat16 weights would lose their low bits."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, stored in state.items():
        loaded = optimizer.state.get(parameters[index]) if isinstance(index, int) else None
        if not (isinstance(loaded, dict) and isinstance(stored, dict)):
            continue
        for key, value in stored.items():
            held = loaded.get(key)
            if isinstance(held, Tensor) and isinstance(value, Tensor) and held.dtype != value.dtype:
                loaded[key] = value.to(held.device)


def is_storable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype in STORABLE


def _check_storable(name: str, tensor: Tensor) -> None:
    if not is_storable(tensor):
        raise UserCodeError(f"a checkpoint cannot keep {name}: a dense tensor is needed, got {describe_tensor(tensor)}")


def describe_tensor(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {str(tensor.layout).removeprefix('torch.')}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous copies on the host, in the same order, that share no memory."""
    lazy = [tensor.detach() for tensor in tensors if tensor.device.type == "xla"]
    if lazy:
        import torch_xla

        fetched = iter(torch_xla._XLAC._xla_get_cpu_tensors(lazy))

    def copy(tensor: Tensor) -> Tensor:
        if tensor.device.type == "xla":
            return next(fetched)  # type: ignore[no-any-return]
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

    return [copy(tensor) for tensor in tensors]


def _below(path: str, key: str | int) -> str:
    # A JSON pointer (RFC 6901), so that different places have different paths.
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{escaped}"


def _unfit(what: str, path: str, why: str) -> UserCodeError:
    return UserCodeError(f"a checkpoint cannot keep {what}: at {path or 'its root'}: {why}")
