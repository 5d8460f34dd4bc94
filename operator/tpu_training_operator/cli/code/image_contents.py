"""Compares the code of a job with what the trainer's images hold, as far as a job names an image that `make images`
builds. Everything here is a warning: an image of that name may hold more.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tpu_contract.protocol import REQUIREMENTS_FILE, WHEELS_FOLDER
from tpu_contract.words import several
from tpu_training_operator.api.trainer import Trainer
from tpu_training_operator.cli.code.imports import find_imports, words_for
from tpu_training_operator.cli.code.packing import PackedCode
from tpu_training_operator.cli.code.requirements import Requirements, read_requirements

_EXTRAS = "tpu-trainer-extras"
_PAGE = "docs/desk.md#packages"
_MOST_SHOWN = 10
# Of the image itself, though no package of the table brings them: ours, those of its venv, and what later Pythons than
# the image's have no more.
_OURS = {
    *("tpu_contract", "tpu_trainer", "pip", "pkg_resources", "setuptools"),
    *("cgi", "distutils", "imghdr", "imp", "lib2to3", "pipes", "telnetlib"),
}
# Packages that bring a module of another name; elsewhere a guess could name a stranger's package.
_BRINGS = {
    "Crypto": "pycryptodome",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "git": "gitpython",
    "hydra": "hydra-core",
    "skimage": "scikit-image",
    "tensorboard": "tensorboard",
}
# The second stack has another torch, and no torch_xla.
_OTHER_STACK = "-torch-tpu"


@cache
def _table() -> Mapping[str, Any]:
    """Returns the packages with their versions and modules, and the packages of each image."""
    text = resources.files(__package__).joinpath("image_contents.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def known_image(reference: str) -> str | None:
    """Returns the name of an image whose contents are known; None for any other."""
    name, _, tag = reference.partition("@")[0].rpartition("/")[2].partition(":")
    return name if name in _table()["images"] and not tag.endswith(_OTHER_STACK) else None


def image_warnings(trainer: Trainer, folder: Path | None, packed: PackedCode | None) -> list[str]:
    """Returns warnings about modules that the code imports and the job's image lacks, and about requirements that the
    image contradicts."""
    image = known_image(trainer.image)
    if image is None or folder is None or packed is None:
        return []
    wanted = read_requirements(folder) if REQUIREMENTS_FILE in packed.sizes else Requirements()
    held: dict[str, tuple[str, list[str]]] = {name: _table()["packages"][name] for name in _table()["images"][image]}
    warnings = [*_contradictions(wanted, image, held), *_missing(trainer, folder, packed, wanted, image, held)]
    loose = [] if any(name.startswith(f"{WHEELS_FOLDER}/") for name in packed.sizes) else _loose(wanted, held)
    if loose:
        warnings.append(
            f"{REQUIREMENTS_FILE} gives no exact version of {several(loose, _MOST_SHOWN)}: hosts and later attempts"
            f" may install different ones; write {loose[0]}==VERSION"
        )
    return warnings


def _contradictions(wanted: Requirements, image: str, held: Mapping[str, tuple[str, list[str]]]) -> Iterator[str]:
    for name, requirement in wanted.of_image().items():
        if name in held and not requirement.specifier.contains(held[name][0], prereleases=True):
            yield (
                f"{REQUIREMENTS_FILE} asks for {requirement.name}{requirement.specifier}, and the image {image} has"
                f" {held[name][0]}, which stays: the workers would refuse the file"
            )


def _loose(wanted: Requirements, held: Mapping[str, object]) -> list[str]:
    """Returns the packages whose version the index decides."""
    return [
        requirement.name
        for name, requirement in wanted.of_image().items()
        if name not in held and not requirement.url and not re.match(r"===?[^*]+$", str(requirement.specifier))
    ]


def _missing(
    trainer: Trainer,
    folder: Path,
    packed: PackedCode,
    wanted: Requirements,
    image: str,
    held: Mapping[str, tuple[str, list[str]]],
) -> Iterator[str]:
    found = find_imports(trainer, folder, packed.sizes)
    there = {module for _, modules in held.values() for module in modules} | _OURS | sys.stdlib_module_names
    missing = [module for module in found if module not in there]
    if not missing or not wanted.is_whole:
        return
    # Another package than the one that gives a module its name may bring it. Then nothing can be said.
    brought = {name: _modules_of(name) for name in wanted.of_image().keys() - held.keys()}
    if any(modules.isdisjoint(found) for modules in brought.values()):
        return
    missing = [module for module in missing if not any(module in modules for modules in brought.values())]
    for module in missing:
        if (file := _elsewhere(module, packed)) is not None:
            yield (
                f"{found[module]} imports {module}, and the folder has that as {file}: Python finds it only as"
                f" {file.removesuffix('/__init__.py').removesuffix('.py').replace('/', '.')}, or if PYTHONPATH or the"
                " code's sys.path leads there"
            )
    missing = [module for module in missing if _elsewhere(module, packed) is None]
    if not missing:
        return
    packages = [_package_of(module) for module in missing]
    in_extras = {module for name in _table()["images"][_EXTRAS] for module in _table()["packages"][name][1]}
    other = f"take the image {_EXTRAS}, which has " + ("it" if len(missing) == 1 else "them")
    if not in_extras.issuperset(missing):
        other = f"build an image on top of {image}"
    yield (
        f"the image {image} lacks what the code imports: {words_for(missing, found)}: name"
        f" {several(packages, _MOST_SHOWN)} in {REQUIREMENTS_FILE}, which the workers install, or {other} ({_PAGE})"
    )


def _elsewhere(module: str, packed: PackedCode) -> str | None:
    """Returns the file of that module below the folder's top."""
    return next(
        (name for name in packed.sizes if f"/{name}".endswith((f"/{module}.py", f"/{module}/__init__.py"))), None
    )


def _modules_of(package: str) -> set[str]:
    """Returns the modules that a package is known to bring, here or in an image, and those of its name."""
    known = _table()["packages"].get(package, ("", ()))[1]
    here = {module for module, owners in _installed().items() if package in owners}
    stem = package.replace("-", "_")
    return {*known, *here, stem, stem.removeprefix("python_"), stem.removesuffix("_python")}


def _package_of(module: str) -> str:
    """Returns words for the package that brings the module, in the version of an image or of this Python if it is
    there."""
    for name, (version, modules) in _table()["packages"].items():
        if module in modules:
            return f"{name}=={version}"
    guess = _BRINGS.get(module, f"the package that brings {module}")
    return next((f"{name}=={metadata.version(name)}" for name in _installed().get(module, ())), guess)


@cache
def _installed() -> dict[str, list[str]]:
    """Returns the packages of this Python by the modules that they bring."""
    found = metadata.packages_distributions().items()
    return {module: [canonicalize_name(name) for name in names] for module, names in found}
