"""Writes docs/python.md, everything that users import from the trainer, from its docstrings: `make crds`.

The sources are read, not imported: importing torch takes seconds.
"""

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "trainer_image" / "tpu_trainer"

_INTRODUCTION = """\
# The Python API

Made from the docstrings by `make crds`. [Write a task](tasks.md) shows how the first part is used, and
[your own training loop](command.md) the second, with the callbacks for Hugging Face's and Lightning's Trainer.
Everything else in the package is internal.

An entrypoint is a callable that returns a [`Task`](#task), a LightningModule, a pair of a LightningModule and a
LightningDataModule, or a [`LightningRun`](#lightningrun). Its parameters are
[filled in by name](tasks.md#hyperparameters-by-name).
"""

_SECTIONS = {
    "`from tpu_trainer import ...`": (
        ("task/task.py", "Task"),
        ("task/task.py", "Hyperparameters"),
        ("task/hooks.py", "Hooks"),
        ("task/logbook.py", "log"),
        ("task/board.py", "SummaryWriter"),
        ("lightning/lightning_run.py", "LightningRun"),
    ),
    "`from tpu_trainer.callbacks import ...`": (
        ("callbacks/session.py", "session"),
        ("callbacks/session.py", "Session"),
    ),
    "Types in their signatures": (
        ("task/task.py", "ShardedStream"),
        ("task/task.py", "Evaluator"),
        ("../../contract/tpu_contract/run_spec.py", "ScheduleSpec"),
    ),
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """Returns the whole page."""
    parts = [_INTRODUCTION]
    for title, members in _SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += ["\n".join(_member(_PACKAGE / file, name)) for file, name in members]
    return "\n".join(parts)


def _member(file: Path, name: str) -> Iterator[str]:
    """Returns the lines about one class or function."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    yield f"### {name}\n"
    for statement in body:
        match statement:
            case ast.ClassDef(name=found) if found == name:
                yield from _class(statement, body)
                return
            case ast.FunctionDef(name=found) if found == name:
                yield f"```python\n{_signature(statement)}\n```\n"
                yield _text(_docstring(statement))
                return
    raise LookupError(f"{file} has no {name}")


def _class(statement: ast.ClassDef, body: Sequence[ast.stmt]) -> Iterator[str]:
    """Returns a description, a table of its fields, a table of its methods."""
    described, rest = _by_field(_docstring(statement))
    if rest:
        yield _text(rest)
    fields = [each for each in statement.body if isinstance(each, ast.AnnAssign)]
    if described:
        yield "| field | meaning |\n|---|---|"
        for field in fields:
            name = ast.unparse(field.target)
            default = "" if field.value is None else f" = {ast.unparse(field.value)}"
            typed = f"{name}: {_type(field.annotation, body)}{default}"
            yield f"| {_code(typed)} | {_cell(described[name])} |"
        yield ""
    methods = list(_offered(statement, body))
    if methods:
        yield "| method | meaning |\n|---|---|"
        for method in methods:
            yield f"| {_code(_call(method))} | {_cell(_docstring(method))} |"
        yield ""


def _offered(statement: ast.ClassDef, body: Sequence[ast.stmt]) -> Iterator[_Function]:
    """Yields the methods that are for users. A module's tuple OFFERED names them where some of a base class are not."""
    named = next(
        (each.value for each in body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "OFFERED"),
        None,
    )
    offered = None if named is None else {leaf.value for leaf in ast.walk(named) if isinstance(leaf, ast.Constant)}
    for each in statement.body:
        if not isinstance(each, _Function) or (offered is not None and each.name not in offered):
            continue
        # Static methods are how the trainer itself makes an object.
        is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in each.decorator_list)
        if not each.name.startswith("_") and not is_static:
            yield each


def _by_field(text: str) -> tuple[dict[str, str], str]:
    """Returns the docstring's lines of the form `name: meaning`, with the indented ones after each, and the rest."""
    described: dict[str, str] = {}
    rest: list[str] = []
    current: str | None = None
    for line in text.splitlines():
        if found := re.match(r"(\w+): +(.*)", line):
            current = found[1]
            described[current] = found[2]
        elif current is not None and line.startswith("    "):
            described[current] += f" {line.strip()}"
        else:
            current = None
            rest.append(line)
    return described, "\n".join(rest).strip()


def _signature(function: _Function) -> str:
    returned = "" if function.returns is None else f" -> {_type(function.returns)}"
    return f"{function.name}({ast.unparse(_arguments(function))}){returned}"


def _call(function: _Function) -> str:
    """Returns the call, without types; for a property its name."""
    if any(ast.unparse(decorator) == "property" for decorator in function.decorator_list):
        return function.name
    arguments = _arguments(function)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return f"{function.name}({ast.unparse(arguments)})"


def _arguments(function: _Function) -> ast.arguments:
    """Returns the parameters without `self`, and without `*_` and `**__`, which only swallow what others would pass."""
    arguments = copy.deepcopy(function.args)
    arguments.args = [each for each in arguments.args if each.arg != "self"]
    if arguments.vararg is not None and arguments.vararg.arg.startswith("_"):
        arguments.vararg = None
    if arguments.kwarg is not None and arguments.kwarg.arg.startswith("_"):
        arguments.kwarg = None
    return arguments


def _type(annotation: ast.expr, body: Sequence[ast.stmt] = ()) -> str:
    """Returns the type as it is written, without the annotations that only the reader of run specs needs."""
    plain = {
        each.targets[0].id: each.value.slice.elts[0]
        for each in body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and _is_annotated(each.value)
    }

    class Plain(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return plain.get(node.id, node)

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return self.visit(node.slice.elts[0]) if _is_annotated(node) else self.generic_visit(node)

    return ast.unparse(Plain().visit(copy.deepcopy(annotation))).replace("'", "")


def _is_annotated(value: ast.expr) -> bool:
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Annotated"


def _docstring(statement: ast.ClassDef | _Function) -> str:
    return ast.get_docstring(statement) or ""


def _text(docstring: str) -> str:
    """Returns the docstring as paragraphs, `Raises:` as a sentence."""
    return re.sub(r"Raises:\n +", "Raises ", docstring) + "\n"


def _cell(docstring: str) -> str:
    return " ".join(_text(docstring).split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
