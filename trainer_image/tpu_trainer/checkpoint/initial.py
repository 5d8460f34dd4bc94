"""Initial weights (checkpoint.initFrom), from another job's checkpoint or from a .safetensors file.

Only a run without a checkpoint takes them. It takes nothing else: steps, optimizer and data start from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tpu_contract.run_spec import InitSpec
from tpu_contract.words import several
from tpu_trainer.checkpoint.catalogue import read_checked
from tpu_trainer.checkpoint.commit import Commit, Folder
from tpu_trainer.checkpoint.origin import CheckpointSource
from tpu_trainer.checkpoint.parts import file_of
from tpu_trainer.checkpoint.search import SearchCriteria, search
from tpu_trainer.checkpoint.snapshot import describe_tensor
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import MissingError, ObjectStore

_SETTING = "checkpoint.initFrom"
_FILE = ".safetensors"
_MOST_NAMES = 8


@dataclass(frozen=True)
class Weights:
    """Tensors by their names in the model. `source`: where they come from, in words. `passed`: why newer checkpoints
    could not be taken, if there are any."""

    source: str
    tensors: Mapping[str, Tensor]
    passed: str = ""


@dataclass(frozen=True)
class Fit:
    """How weights fit a model. `loaded`: the number of tensors that fit. The lists describe one tensor in each text."""

    loaded: int
    missing: Sequence[str]
    unexpected: Sequence[str]
    different: Sequence[str]

    @property
    def differences(self) -> str:
        """Returns what does not fit, in words; empty if everything fits."""
        parts = {
            "the model has, and they lack": self.missing,
            "they have, and the model lacks": self.unexpected,
            "differ": self.different,
        }
        return "; ".join(f"{what}: {several(names, _MOST_NAMES)}" for what, names in parts.items() if names)


def load_initial_weights(spec: InitSpec, model: nn.Module) -> tuple[str, str | None]:
    """Gives the model, which is still on the host, the weights that checkpoint.initFrom names.

    Returns where they come from, and what did not fit or was passed over (None if nothing was).

    Raises:
        UserCodeError: there are none, or they do not fit.
        BadSpecError: it is not a place for checkpoints.
        StorageError: the storage refuses.
    """
    weights = _from_file(spec.uri) if spec.uri.endswith(_FILE) else _from_checkpoint(spec.uri)
    fit = load_weights(weights.tensors, model, strict=spec.strict)
    source, passed = f"{fit.loaded} tensors of {weights.source}", [weights.passed] if weights.passed else []
    if not fit.differences:
        return source, "; ".join(passed) or None
    if not spec.strict and fit.loaded:
        return source, "; ".join([*passed, f"begins with only a part of its weights: {fit.differences}"])
    hint = "to load those that fit, set strict: false" if fit.loaded else "no tensor fits"
    raise UserCodeError(f"{_SETTING}: the weights of {weights.source} do not fit the model; {hint}; {fit.differences}")


def load_weights(tensors: Mapping[str, Tensor], model: nn.Module, *, strict: bool) -> Fit:
    """Copies the tensors that have the name and shape of one of the model's; with `strict`, only if all of them fit.

    A weight that the model uses in several places may have any of its names. Floating-point types are converted.
    """
    with user_code("the model's state_dict()"):
        state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    pairs = {name: (tensor, state[name]) for name, tensor in tensors.items() if name in state}
    different = [
        f"{name} ({describe_tensor(tensor)} there, {describe_tensor(target)} in the model)"
        for name, (tensor, target) in pairs.items()
        if not _fits(tensor, target)
    ]
    named = {id(target) for _, target in pairs.values()}
    fitting = {name: pair for name, pair in pairs.items() if _fits(*pair)}
    missing = {id(target): name for name, target in reversed(state.items()) if id(target) not in named}
    fit = Fit(len(fitting), sorted(missing.values()), sorted(tensors.keys() - state.keys()), sorted(different))
    if not (strict and fit.differences):
        with torch.no_grad():
            for tensor, target in fitting.values():
                target.copy_(tensor)
    return fit


def _from_file(uri: str) -> Weights:
    parent, _, name = uri.rpartition("/")
    data = _read(open_store(parent or "/", f"{_SETTING}.uri"), name)
    return Weights(uri, _parse(data, uri))


def _read(store: ObjectStore, name: str) -> bytes:
    try:
        return store.read(name)
    except MissingError as error:
        raise UserCodeError(f"{_SETTING}: {error}") from None


def _from_checkpoint(uri: str) -> Weights:
    """Returns the weights of the named checkpoint, or of the newest clean one; averaged weights, where there are
    any."""
    there = CheckpointSource.at(uri, f"{_SETTING}.uri")
    criteria = SearchCriteria(lambda commit: commit.clean or there.folder is not None, folder=there.folder)
    lines: list[str] = []
    result = search(there.store, criteria, lambda *checkpoint: _weights(there.store, *checkpoint), lines.append)
    if result.taken is None:
        why = f" ({'; '.join(lines)})" if lines else ""
        raise UserCodeError(
            f"{_SETTING}: there is no whole checkpoint in {uri}{why}; name the folder of a job, which holds step-..., "
            f"one of these, or a file that ends with {_FILE}"
        )
    if not result.passed:
        return result.taken
    return replace(result.taken, passed=f"takes {result.taken.source}, which is not the newest: {result.passed[0]}")


def _weights(store: ObjectStore, folder: Folder, commit: Commit) -> Weights:
    model, average = (_tensors(store, folder, commit, file) for file in ("model", "ema"))
    averaged = " (averaged)" if average else ""
    return Weights(f"checkpoint {folder} of job {commit.author}{averaged}", {**model, **average})


def _tensors(store: ObjectStore, folder: Folder, commit: Commit, file: str) -> dict[str, Tensor]:
    """Returns the tensors of all parts of the file; empty if the checkpoint has no such file."""
    tensors: dict[str, Tensor] = {}
    for name in commit.files:
        if file_of(name) == file:
            tensors |= _parse(read_checked(store, folder, commit, name), f"{store.uri}, {folder}")
    return tensors


def _parse(data: bytes, where: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserCodeError(f"{_SETTING}: {where} is not a safetensors file: {error}") from None


def _fits(there: Tensor, target: Any) -> bool:
    kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (there, target)]
    return there.shape == target.shape and (there.dtype == target.dtype or kinds == [(True, False)] * 2)
