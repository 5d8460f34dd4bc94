"""Nested dicts and lists of JSON values and tensors, taken apart for a checkpoint and put together again.

The tensors go to a safetensors file under the path that leads to them, the rest becomes JSON with a reference in each
tensor's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpu_trainer.errors import UserCodeError

_REFERENCE = "$tensor"


def take_apart(value: Any, what: str) -> tuple[Any, dict[str, Tensor]]:
    """The JSON value, and the tensors by path ("/0/exp_avg"); `what` is whose state it is, for the error.

    Tuples become lists.

    Raises:
        UserCodeError: something in it is neither JSON nor a tensor, or a key is no text; the text names the place.
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
    """The inverse of `take_apart`."""
    if isinstance(value, list):
        return [put_together(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _REFERENCE in value:
        return tensors[value[_REFERENCE]]
    return {key: put_together(item, tensors) for key, item in value.items()}


def _below(path: str, key: str | int) -> str:
    # A JSON pointer (RFC 6901): different places have different paths.
    own = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{own}"


def _unfit(what: str, path: str, why: str) -> UserCodeError:
    return UserCodeError(f"a checkpoint cannot keep {what}: at {path or 'its root'}: {why}")
