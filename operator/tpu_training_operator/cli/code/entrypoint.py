"""Checks that a job's code can be found, before `tpujob run` starts any worker.

Nothing is imported: user code runs only in workers, and importing torch here would take seconds.
"""

import ast
import difflib
import pkgutil
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from tpu_training_operator.api.text import plain
from tpu_training_operator.api.trainer import BackendName, Trainer
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.code.import_effects import executed, has_main_guard, trained_in, trained_on_import

_FIELD = "spec.trainer.entrypoint"
_DEFINE_BY_NAME = ("exec", "globals", "locals", "setattr", "vars")
_MOST_QUOTED = 60


def find_problem(trainer: Trainer, python_path: Sequence[Path]) -> Problem | None:
    """Returns the problem that would keep the workers from starting the job's code; None if there is none."""
    if trainer.command is not None:
        return _command_problem(trainer.command[0], python_path)
    if missing := _missing_package(trainer.backend):
        return missing
    module, _, attribute = (trainer.entrypoint or "").partition(":")
    spec, problem = _find_module(module, [str(path) for path in python_path])
    if problem is not None or spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return problem
    return _attribute_problem(module, attribute, Path(spec.origin))


def _command_problem(command: str, places: Sequence[Path]) -> Problem | None:
    if command in ("python", "python3") or shutil.which(command):
        return None
    if "/" in command and any((place / command).is_file() for place in places):
        return None
    return Problem("spec.trainer.command[0]", f"there is no program {command!r} on this machine")


def _missing_package(backend: BackendName) -> Problem | None:
    """Returns a problem if torch or torch_xla is missing; `tpujob` does not install them, because most commands need
    neither."""
    remedy = f"{sys.executable} does not have; install the trainer there, as docs/install.md says"
    if find_spec("torch") is None:
        return Problem("spec.trainer", f"the workers need torch, which {remedy}")
    if backend is not BackendName.TORCH and find_spec("torch_xla") is None:
        other = "or, on a system without its wheels, add --set trainer.backend=Torch"
        return Problem("spec.trainer.backend", f"backend {backend} needs torch_xla, which {remedy}, {other}")
    return None


def _find_module(name: str, paths: list[str]) -> tuple[ModuleSpec | None, Problem | None]:
    where: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for index, part in enumerate(parts):
        # Looked up by its last part: with the full name, Python would import the parent package.
        spec = _find_top_level(part, paths) if where is None else PathFinder.find_spec(part, where)
        if spec is None:
            return None, _no_module(".".join(parts[: index + 1]), part, where or paths)
        where = list(spec.submodule_search_locations or ())
    return spec, None


def _find_top_level(name: str, paths: list[str]) -> ModuleSpec | None:
    """Looks where the workers look first, then with this Python's finders, of which an editable install may add one."""
    here = PathFinder.find_spec(name, paths)
    return here or next(filter(None, (finder.find_spec(name, None) for finder in sys.meta_path)), None)


def _no_module(full_name: str, part: str, where: list[str]) -> Problem:
    known = [module.name for module in pkgutil.iter_modules(where)]
    nearest = difflib.get_close_matches(part, known, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return Problem(_FIELD, f"there is no module {full_name!r} in {' or '.join(dict.fromkeys(where))}{hint}")


def find_problem_in(trainer: Trainer, folder: Path) -> Problem | None:
    """Returns the problem of an entrypoint whose module is in the folder; None if it is elsewhere."""
    module, _, attribute = (trainer.entrypoint or "").partition(":")
    source = _source_in([folder], module)
    return None if source is None else _attribute_problem(module, attribute, source)


def import_warning(trainer: Trainer, places: Sequence[Path]) -> str | None:
    """Returns what the import of the entrypoint's module, or the call of the entrypoint, would itself train; None if
    nothing, or if nothing can be read."""
    module, _, name = (trainer.entrypoint or "").partition(":")
    if (source := _source_in(places, module)) is None:
        return None
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, OSError, ValueError, RecursionError):
        return None
    each = f"entrypoint {trainer.entrypoint}: each process of a worker, one for each chip,"
    if (line := trained_on_import(tree)) is not None:
        return (
            f"{each} imports {source.name}, which executes {_quoted(source, line)} before the training begins: move"
            " that below `if __name__ == '__main__':`"
        )
    if (line := trained_in(tree, name)) is not None:
        return (
            f"{each} calls {name}, which executes {_quoted(source, line)}: a task reads no command line, joins no"
            " processes and does not train; it returns model, data and loss (docs/from-train-py.md)"
        )
    return None


def _source_in(places: Sequence[Path], module: str) -> Path | None:
    if not module:
        return None
    names = (module.replace(".", "/") + "/__init__.py", module.replace(".", "/") + ".py")
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def _quoted(source: Path, line: int) -> str:
    text = source.read_bytes().decode(errors="replace").splitlines()[line - 1].strip()
    return f"line {line} ({plain(text[:_MOST_QUOTED])})"


def _attribute_problem(module: str, attribute: str, source: Path) -> Problem | None:
    try:
        # From bytes, so that Python detects the encoding.
        tree = ast.parse(source.read_bytes(), str(source))
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno else ""
        return Problem(_FIELD, f"module {module!r} has a syntax error{where}: {error.msg}")
    except (OSError, ValueError, RecursionError) as error:
        return Problem(_FIELD, f"module {module!r} cannot be read: {error}")
    names = _top_level_names(tree)
    if names is None or attribute in names:
        return None
    line = trained_on_import(tree)
    if line is not None or (has_main_guard(tree) and not difflib.get_close_matches(attribute, names)):
        trains = f", and its import would train on every chip, as it executes {_quoted(source, line)}" if line else ""
        return Problem(
            _FIELD,
            f"module {module!r} has no {attribute!r}{trains}: it is a script. Make a task of it"
            " (docs/from-train-py.md), or run it as it is:"
            f" trainer.command: [python, {source.name}] in place of entrypoint (docs/command.md)",
        )
    nearest = difflib.get_close_matches(attribute, names, n=3, cutoff=0.4) or sorted(names)[:5]
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return Problem(_FIELD, f"module {module!r} has no {attribute!r}{hint}")


def _top_level_names(tree: ast.Module) -> set[str] | None:
    """Returns the names that a module may define; None if only running it would show them."""
    names: set[str] = set()
    for node in executed(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                if any(alias.name == "*" for alias in aliases):
                    return None
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names |= set(node.names)
        elif isinstance(node, ast.Name) and node.id in _DEFINE_BY_NAME:
            return None
    return None if "__getattr__" in names else names
