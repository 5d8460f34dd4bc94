"""Finds what the import of a module would execute of a training, by reading its text.

Every worker process imports the entrypoint's module, one for each chip. A script without a main guard trains in that
import, before the trainer has begun.
"""

import ast
import re
from collections.abc import Iterator, Set

# Methods that only a training, its start or its command line calls.
_METHODS = {"backward", "fit", "launch", "parse_args", "parse_args_into_dataclasses", "spawn", "step"}
# Those that no function calls that builds a model and data; scikit-learn's preprocessing has a fit.
_NOT_OF_A_TASK = {"backward", "init_process_group", "parse_args", "parse_args_into_dataclasses"}
_FUNCTIONS = re.compile(r"(main|fit|train)(_(model|loop|worker|fn|process|network|one_epoch|epochs?|and_\w+))?$")
_Functions = dict[str, ast.FunctionDef | ast.AsyncFunctionDef]


def trained_on_import(tree: ast.Module) -> int | None:
    """Returns the first line with which the import of the module would train; None if there is none."""
    calls = (node for node in executed(tree) if isinstance(node, ast.Call))
    return min((call.lineno for call in calls if _trains(call, _functions(tree), set())), default=None)


def trained_in(tree: ast.Module, name: str) -> int | None:
    """Returns the first line with which a call of the module's function would itself train, or read a command line;
    None if there is none, or no such function."""
    functions = _functions(tree)
    if name not in functions:
        return None
    calls = (node for node in executed(functions[name]) if isinstance(node, ast.Call))
    return min((call.lineno for call in calls if _trains(call, functions, {name}, _NOT_OF_A_TASK)), default=None)


def has_main_guard(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and _is_main_guard(node.test) for node in tree.body)


def _functions(tree: ast.Module) -> _Functions:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what an import executes: all but the bodies of functions and classes and what a main guard keeps back."""
    # An expression may be nested deeper than Python recurses.
    waiting = [node]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            yield child
            if isinstance(child, ast.If) and _is_main_guard(child.test):
                yield from child.orelse
                waiting += child.orelse
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                waiting.append(child)


def _is_main_guard(test: ast.expr) -> bool:
    parts = list(ast.walk(test))
    compares = any(isinstance(part, ast.Constant) and part.value == "__main__" for part in parts)
    return compares and any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)


def _trains(call: ast.Call, functions: _Functions, seen: set[str], methods: Set[str] = _METHODS) -> bool:
    """Returns whether the call is of a training, perhaps in a function of the module that it calls. `seen`: those
    known."""
    match call.func:
        case ast.Attribute(attr=name):
            return name in methods
        case ast.Name(id=name) if name not in functions:
            return methods is _METHODS and bool(_FUNCTIONS.match(name))
        case ast.Name(id=name) if name not in seen:
            seen.add(name)
            inner = (node for node in ast.walk(functions[name]) if isinstance(node, ast.Call))
            return any(_trains(one, functions, seen, methods) for one in inner)
    return False
