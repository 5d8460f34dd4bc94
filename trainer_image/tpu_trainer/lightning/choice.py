"""Finds in a module's source what only Lightning's Trainer does, before a step fails on it in the middle of a run.

A guard (`if self.logger:`) is not evaluated: Lightning's Trainer may then train a module that the trainer's own loop
could have trained, which costs speed but never the run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING

from tpu_trainer.lightning.session import LIGHTNING, readable_names
from tpu_trainer.task.board import ReportLogger, SummaryWriter

if TYPE_CHECKING:
    from torch import nn

_NOT_IN_TRAINING = ("test_", "predict_", "on_test_", "on_predict_")

_CALLS = {
    "all_gather": "it calls self.all_gather()",
    "manual_backward": "it calls self.manual_backward()",
    "toggle_optimizer": "it calls self.toggle_optimizer()",
}
"""Methods of a LightningModule that call its Trainer's strategy."""

_LOGGERS = ("logger", "loggers")
_LOGGER_NAMES = {*dir(ReportLogger), "experiment"} - {"log_dir", "save_dir"}
"""Names that the logger of the trainer's own loop provides. It has no directory."""

# Replicas may be threads, and Python's parser counts its recursion depth for all threads together.
_PARSER = Lock()


def reason_in_code(module: nn.Module) -> str | None:
    """Returns the first reason in the source of the module's own methods to use Lightning's Trainer; None without one,
    or without the source."""
    for name, tree in _methods(module):
        for node in ast.walk(tree):
            if (
                reason := _attribute_reason(node) or (name == "training_step" and _return_reason(node, tree)) or None
            ) is None:
                continue
            return f"{type(module).__name__}.{name}: {reason}"
    return None


def may_skip_step(module: nn.Module) -> bool:
    """Returns whether the source of `training_step` has a path that returns None."""
    steps = (tree for name, tree in _methods(module) if name == "training_step")
    return any(_return_reason(node, tree) for tree in steps for node in ast.walk(tree))


def _methods(module: nn.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yields the name and syntax tree of each method that training may call, in the order of definition."""
    seen: set[str] = set()
    for owner in type(module).__mro__:
        root = owner.__module__.partition(".")[0]
        if root in (*LIGHTNING, "torch", "builtins"):
            continue
        for name, value in vars(owner).items():
            function = value.fget if isinstance(value, property) else value
            if name in seen or name.startswith(_NOT_IN_TRAINING) or not inspect.isfunction(function):
                continue
            seen.add(name)
            if (tree := _tree(function)) is not None:
                yield name, tree


def _tree(function: Callable[..., object]) -> ast.AST | None:
    try:
        with _PARSER:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        # Defined in a shell, or wrapped by a decorator that hides the source.
        return None


def _attribute_reason(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Attribute):
        return None
    holder, name = node.value, node.attr
    if isinstance(holder, ast.Name) and holder.id == "self":
        return _CALLS.get(name)
    if isinstance(holder, ast.Attribute) and holder.attr in _LOGGERS:
        return None if name in _LOGGER_NAMES else f"it uses self.{holder.attr}.{name}"
    if isinstance(holder, ast.Attribute) and holder.attr == "experiment":
        return None if hasattr(SummaryWriter, name) else f"it uses {ast.unparse(node)}"
    if (isinstance(holder, ast.Attribute) and holder.attr == "trainer") or (
        isinstance(holder, ast.Name) and holder.id == "trainer"
    ):
        if isinstance(node.ctx, ast.Store):
            return f"it sets trainer.{name}"
        if name not in readable_names():
            return f"it uses trainer.{name}"
    return None


def _return_reason(node: ast.AST, step: ast.AST) -> str | None:
    """Returns why a `return` without a value needs Lightning's Trainer, unless an inner function holds it."""
    if not isinstance(node, ast.Return) or any(node in ast.walk(inner) for inner in _inner_functions(step)):
        return None
    return "it may return None, which skips the batch" if node.value is None or _may_be_none(node.value) else None


def _may_be_none(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _may_be_none(value.body) or _may_be_none(value.orelse)
    return isinstance(value, ast.Constant) and value.value is None


def _inner_functions(tree: ast.AST) -> Iterator[ast.AST]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    _, *inner = (node for node in ast.walk(tree) if isinstance(node, functions))
    yield from inner
