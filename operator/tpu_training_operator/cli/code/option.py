"""`--code FOLDER` of `tpujob submit`, `run` and `compile-check` replaces the image's code by a folder."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from tpu_contract.words import several
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.code.entrypoint import find_problem, find_problem_in, import_warning
from tpu_training_operator.cli.code.packing import PackedCode, pack, size_text
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.job_file import JobFile

_MOST_SHOWN = 10
# Packages that take a TPU's chips if torch_xla is there, and torch_xla's rivals.
_USES_CHIPS = re.compile(
    rb"^\s*(from|import)\s+(torch_xla|torch_tpu|accelerate|lightning|pytorch_lightning|transformers|jax|tensorflow)\b",
    re.M,
)
_OF_THE_TRAINER = ("numpy", "safetensors", "torch", "torch_xla", "tpu_contract", "tpu_trainer")


def code_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--code",
        "code",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        help="Run the code in this folder, without a new image. .gitignore and .tpujobignore say what to leave out.",
    )(command)


def module_paths(file: JobFile, code: Path | None) -> list[Path]:
    """Returns where modules are found besides installed packages: for a job with code only there, as in a cluster."""
    if code is not None:
        return [code.resolve()]
    if file.job.spec.trainer.code is not None:
        return []
    return [Path.cwd(), Path.cwd() if str(file.path) == "-" else file.path.resolve().parent]


def code_problem(file: JobFile, code: Path | None, python_path: list[Path]) -> Problem | None:
    """Returns the problem that keeps the code from being found on this machine; None if there is none."""
    trainer = file.job.spec.trainer
    if code is not None or trainer.code is None:
        return find_problem(trainer, python_path)
    if trainer.code.secret is None:
        # Only the worker that fetches the archive can look into it.
        return None
    return Problem("spec.trainer.code.uri", f"{trainer.code.uri} is in a cluster; here, add --code FOLDER")


def pack_code(file: JobFile, code: Path | None) -> PackedCode | None:
    """Packs the folder, if there is one. Raises BadInput for an entrypoint that its module there does not have."""
    if code is None:
        return None
    packed, trainer = pack(code), file.job.spec.trainer
    is_packed = trainer.entrypoint is not None and packed.has_module(trainer.entrypoint)
    if is_packed and (problem := find_problem_in(trainer, code)) is not None:
        raise BadInput(file.path, [problem])
    return packed


def code_warnings(file: JobFile, packed: PackedCode | None, python_path: list[Path]) -> list[str]:
    """Returns warnings about the code: a module whose import would train, and if it is packed, files that look like
    secrets, files that replace a module that the trainer needs, and an entrypoint that is not in the folder, perhaps
    because of an ignore file."""
    entrypoint = file.job.spec.trainer.entrypoint
    notes = [warning] if (warning := import_warning(file.job.spec.trainer, python_path)) else []
    if packed is None:
        return notes
    notes += [*_secret_warnings(packed), *_shadowing_warnings(packed), *_idle_chip_warnings(file, packed, python_path)]
    if entrypoint is not None and not packed.has_module(entrypoint):
        module = entrypoint.partition(":")[0]
        notes.append(
            f"entrypoint {entrypoint}: no module {module} is packed; only a package installed in the image can have it"
        )
    return notes


def _secret_warnings(packed: PackedCode) -> Iterator[str]:
    if packed.secrets:
        names = [ascii(name)[1:-1] for name in packed.secrets]
        yield (
            f"left out, because such files often hold secrets: {several(names, _MOST_SHOWN)}; to pack one that"
            f" the workers need, name it in .tpujobignore: !{names[0]}"
        )


def _shadowing_warnings(packed: PackedCode) -> Iterator[str]:
    for name in packed.sizes:
        module = name.removesuffix("/__init__.py").removesuffix(".py")
        if not name.endswith(".py") or "/" in module:
            continue
        if module in sys.stdlib_module_names:
            yield (
                f"{name} has the name of a standard module: torch and all others that import {module} would get yours;"
                " rename it"
            )
        elif module in _OF_THE_TRAINER:
            yield f"{name} has the name of a package that the trainer imports: it would get yours; rename it"


def _idle_chip_warnings(file: JobFile, packed: PackedCode, places: list[Path]) -> Iterator[str]:
    """Yields a warning if the command is a script of the folder, and nothing in the folder imports what uses chips."""
    spec = file.job.spec
    words = [*(spec.trainer.command or ()), *(spec.trainer.args or ())]
    script = next((word.removeprefix("./") for word in words if word.removeprefix("./") in packed.sizes), "")
    if spec.slice.hardware is not Hardware.TPU or not script.endswith(".py"):
        return
    sources = (place / name for place in places for name in packed.sizes if name.endswith(".py"))
    if not any(_USES_CHIPS.search(source.read_bytes()) for source in sources if source.is_file()):
        yield (
            f"nothing in the folder imports torch_xla, so {script} trains on the hosts' CPUs, beside idle chips: start"
            " it with torch_xla.launch, or make a task of it (docs/from-train-py.md)"
        )


def add_code(body: dict[str, Any], packed: PackedCode, uri: str) -> None:
    body["spec"]["trainer"]["code"] = {"uri": uri, "sha256": packed.sha256}


def code_summary(packed: PackedCode, uri: str) -> str:
    return (
        f"code: {count(len(packed.sizes), 'file')}, {size_text(len(packed.archive))} packed, sha256 {packed.sha256},"
        f" in {uri}"
    )
