"""Finds the modules that a folder's code imports from outside of the folder, by reading its text."""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from tpu_training_operator.api.trainer import Trainer

_ABSENT = {"BaseException", "Exception", "ImportError", "ModuleNotFoundError"}


@dataclass(frozen=True)
class Place:
    """The first line that imports a module."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def find_imports(trainer: Trainer, folder: Path, names: Collection[str]) -> dict[str, Place]:
    """Returns the top-level modules that the job's code needs and the folder does not have, each with its place.

    `names`: the files that are packed. Only what the entrypoint or the command's scripts lead to is read: a folder may
    hold tests and notebooks, too.
    """
    starts = _starts(trainer, names)
    roots = list(dict.fromkeys(("", *(_directory(name) for name in starts if trainer.command is not None))))
    found, seen, waiting = dict[str, Place](), set(starts), list(starts)
    while waiting:
        name = waiting.pop(0)
        for module, line in _read(folder, name):
            inside = [file for root in roots for file in _files_of(module, names, root)]
            if module.startswith("torch/utils/tensorboard"):
                # torch does not require what this part of it imports.
                found.setdefault("tensorboard", Place(name, line))
            if not inside and not any(_has(root + module.partition("/")[0], names) for root in roots):
                found.setdefault(module.partition("/")[0], Place(name, line))
            waiting += [file for file in inside if file not in seen]
            seen.update(inside)
    return found


def _starts(trainer: Trainer, names: Collection[str]) -> list[str]:
    if trainer.command is None:
        module = (trainer.entrypoint or "").partition(":")[0]
        return _files_of(module.replace(".", "/"), names)
    # `bash -c "python train.py"` has the script within a word.
    words = re.split(r"[\s;&|'\"]+", " ".join([*trainer.command, *(trainer.args or ())]))
    scripts = [str(PurePosixPath(word)) for word in words]
    modules = [after.replace(".", "/") for word, after in pairwise(words) if word == "-m"]
    started = [name for name in scripts if name in names and name.endswith(".py")]
    started += [file for module in modules for file in _files_of(module, names)]
    # A shell script may start any of them.
    return started or sorted(name for name in names if name.endswith(".py"))


def _directory(name: str) -> str:
    parent = PurePosixPath(name).parent.as_posix()
    return "" if parent == "." else f"{parent}/"


def _has(top: str, names: Collection[str]) -> bool:
    return any(
        name == f"{top}.py" or name.startswith(f"{top}/") or (name.startswith(f"{top}.") and name.endswith(".so"))
        for name in names
    )


def _files_of(module: str, names: Collection[str], root: str = "") -> list[str]:
    """Returns the files that the import of a/b/c executes, of those in the folder. `root`: where `a` is looked for."""
    parts, files = module.split("/"), list[str]()
    for end in range(1, len(parts) + 1):
        path = root + "/".join(parts[:end])
        files += [name for name in (f"{path}/__init__.py", f"{path}.py") if name in names]
    if files and (main := f"{root}{module}/__main__.py") in names:
        files.append(main)
    return files


def _read(folder: Path, name: str) -> Iterator[tuple[str, int]]:
    """Yields each module that the file imports, as a path, and its line; nothing of a file that cannot be read."""
    try:
        tree = ast.parse((folder / name).read_bytes())
    except (SyntaxError, OSError, ValueError, RecursionError):
        return
    for node in _needed(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.replace(".", "/"), node.lineno) for alias in node.names)
            continue
        base = (node.module or "").replace(".", "/")
        if node.level:
            # An import of the folder's own: its files are read, and nothing of it can be missing here.
            parents = PurePosixPath(name).parts[: -node.level]
            base = "/".join([*parents, *([base] if base else [])]) if parents else ""
        for path in (base, *(f"{base}/{alias.name}" for alias in node.names)) if base else ():
            yield path, node.lineno


def _needed(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports without those that may fail, or that only a type checker follows."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import() | ast.ImportFrom():
                yield child
            case ast.Try(handlers=handlers) if any(_catches_absence(handler) for handler in handlers):
                continue
            case ast.If(test=test, orelse=orelse) if _is_type_checking(test):
                for statement in orelse:
                    yield from _needed(ast.Module([statement], []))
            case ast.With(items=items) if any(_suppresses_absence(item.context_expr) for item in items):
                continue
            case ast.expr():
                # It holds no statement, and may be nested deeper than Python recurses.
                continue
            case _:
                yield from _needed(child)


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or _names_absence(handler.type)


def _suppresses_absence(context: ast.expr) -> bool:
    match context:
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=classes):
            return any(map(_names_absence, classes))
    return False


def _names_absence(classes: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id in _ABSENT for part in ast.walk(classes))


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def words_for(modules: Sequence[str], found: dict[str, Place]) -> str:
    """Returns for example: torchvision (train.py, line 3) and wandb (loop.py, line 1)."""
    told = [f"{module} ({found[module]})" for module in modules]
    return " and ".join([", ".join(told[:-1]), told[-1]] if told[1:] else told)
