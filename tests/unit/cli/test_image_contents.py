"""What `submit` and `validate` say of a folder's imports and requirements, and that the table of the images is true."""

import re
import runpy
from collections import deque
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from syrupy.assertion import SnapshotAssertion

from tpu_training_operator.api.trainer import Trainer
from tpu_training_operator.cli.code import image_contents
from tpu_training_operator.cli.code.image_contents import image_warnings
from tpu_training_operator.cli.code.imports import find_imports
from tpu_training_operator.cli.code.packing import pack

ROOT = Path(__file__).parents[3]
IMAGE = "europe-docker.pkg.dev/team/images/tpu-trainer:0.2.0.g1234567"
CODE = {
    "train": "import torch, timm.models\n\n\ndef task():\n    from torchvision import models\n    import mine.parts\n",
    "mine/parts": "import numpy\n",
}


def folder(tmp_path: Path, files: dict[str, str]) -> Path:
    """The files by name; those without an ending are modules."""
    for name, text in files.items():
        path = tmp_path / (name if "." in name else f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def said(code: Path, image: str = IMAGE, **trainer: Any) -> list[str]:
    how = trainer or {"entrypoint": "train:task"}
    return image_warnings(Trainer(image=image, **how), code, pack(code))


# Which modules a folder imports.

GUARDED = "try:\n    import apex\nexcept (ImportError, AttributeError):\n    import fallback\n"
TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hints\nelse:\n    import real\n"
SUPPRESSED = "import contextlib\nwith contextlib.suppress(ImportError):\n    import apex\n"
BUILT = "ext.cpython-311-x86_64-linux-gnu.so"
CAUGHT = "try:\n    import needed\nexcept ValueError:\n    pass\n"


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        ({"train": "import a.b, c as d\nfrom e.f import g\n"}, ["a", "c", "e"]),
        ({"train": "def f():\n    import inside\n"}, ["inside"]),
        ({"train": GUARDED + TYPED + CAUGHT}, ["typing", "real", "needed"]),
        ({"train": "import helper", "helper": "import deep"}, ["deep"]),
        ({"train": "from mine import part", "mine/part": "import deep"}, ["deep"]),
        (
            {"train": "import mine.part", "mine/__init__": "from . import other", "mine/other": "import deep"},
            ["deep"],
        ),
        ({"train": "import mine.data", "mine/data": "", "mine/other": "import unread"}, []),
        ({"train": "import timm", "timm": ""}, []),
        ({"train": "import a", "test_train": "import pytest"}, ["a"]),
        ({"train": "import a\nimport (", "other": "import b"}, []),
        ({"train": SUPPRESSED + CAUGHT}, ["contextlib", "needed"]),
        ({"train": "from torch.utils.tensorboard import SummaryWriter"}, ["tensorboard", "torch"]),
        ({"train": "import ext", BUILT: ""}, []),
        ({"train": "from .absent import f"}, []),
        # Deeper than Python's parser goes.
        ({"train": "import a, other", "other": "x = " + "+".join("1" * 20_000)}, ["a"]),
        ({"other": "import b"}, []),
    ],
)
def test_the_imports_that_the_entrypoint_leads_to(tmp_path: Path, files: dict[str, str], modules: list[str]) -> None:
    code = folder(tmp_path, files)
    trainer = Trainer(image="x", entrypoint="train:task")
    assert list(find_imports(trainer, code, pack(code).sizes)) == modules


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        (["python", "run/loop.py"], {"a"}),
        (["python", "-u", "./run/loop.py"], {"a"}),
        (["python", "-m", "run.loop"], {"a"}),
        (["python", "-m", "pack"], {"b"}),
        (["bash", "-c", "pip list; python run/loop.py --steps 3"], {"a"}),
        (["bash", "start.sh"], {"a", "b"}),
    ],
)
def test_the_imports_of_a_command(tmp_path: Path, command: list[str], modules: set[str]) -> None:
    # A script finds what is beside it.
    files = {"run/loop": "import a, beside", "run/beside": "", "pack/__init__": "", "pack/__main__": "import b"}
    code = folder(tmp_path, {**files, "start.sh": ""})
    assert find_imports(Trainer(image="x", command=command), code, pack(code).sizes).keys() == modules


# What is said.


@pytest.mark.parametrize(
    ("requirements", "image"),
    [
        (None, IMAGE),
        ("timm==1.0.31\n", IMAGE),
        ("timm==1.0.31\ntorchvision>=0.20\nnumpy<2\n", IMAGE),
        (None, "localhost/tpu-examples:1@sha256:" + "0" * 64),
    ],
    ids=["nothing", "one of two", "loose and contradicted", "of the examples"],
)
def test_a_warning_names_module_place_and_both_ways(
    tmp_path: Path, requirements: str | None, image: str, snapshot: SnapshotAssertion
) -> None:
    files = {} if requirements is None else {"requirements.txt": requirements}
    assert said(folder(tmp_path, {**CODE, **files}), image) == snapshot


@pytest.mark.parametrize(
    "requirements",
    [
        "timm==1.0.31\ntorchvision==0.24.0\n",
        # Other packages may bring any module.
        "-r more.txt\n",
        "./local.whl\n",
        "a-meta-package==1.0\n",
    ],
)
def test_nothing_is_said_where_the_requirements_may_bring_the_modules(tmp_path: Path, requirements: str) -> None:
    assert said(folder(tmp_path, {**CODE, "requirements.txt": requirements})) == []


@pytest.mark.parametrize(
    "image", ["localhost/tpu-trainer-extras:0.2.0", "localhost/mine:1", "localhost/tpu-trainer:0.2.0-torch-tpu"]
)
def test_nothing_is_said_of_an_image_that_has_everything_or_is_unknown(tmp_path: Path, image: str) -> None:
    assert said(folder(tmp_path, CODE), image) == []


def test_a_requirement_of_another_platform_does_not_count(tmp_path: Path) -> None:
    requirements = "numpy<2; sys_platform == 'darwin'\ntimm==1.0.31\ntorchvision==0.24.0; python_version < '3.9'\n"
    (warning,) = said(folder(tmp_path, {**CODE, "requirements.txt": requirements}))
    assert re.findall(r"torchvision|timm|numpy", warning) == ["torchvision", "torchvision"]


@pytest.mark.parametrize(
    "line",
    ["numpy<2; sys_platform ~= 'linux'", "numpy<2; 'gpu' in extras", "numpy==" + "9" * 5000],
    ids=["marker", "extras", "digits"],
)
def test_a_line_that_cannot_be_compared_is_left_to_uv(tmp_path: Path, line: str) -> None:
    assert said(folder(tmp_path, {**CODE, "requirements.txt": line})) == []


@pytest.mark.parametrize("text", ["numpy<2\nnumpy\n", "\ufeffnumpy<2\r\n"], ids=["twice", "byte order mark"])
def test_every_line_counts(tmp_path: Path, text: str) -> None:
    (warning,) = said(folder(tmp_path, {"train": "import torch", "requirements.txt": text}))
    assert warning.startswith("requirements.txt asks for numpy<2")


def test_no_package_is_guessed_from_the_name_of_a_module(tmp_path: Path) -> None:
    code = folder(tmp_path, {"train": "import cv2, nowhere, parts", "src/parts": ""})
    elsewhere, missing = said(code)
    assert elsewhere.startswith("train.py, line 1 imports parts, and the folder has that as src/parts.py")
    assert "name opencv-python-headless, the package that brings nowhere in requirements.txt" in missing


# The table.

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "image_contents.py"))
TABLE = image_contents._table()
# They have no package in the image, which copies them.
INSTALLED = {canonicalize_name(one.name): one for one in metadata.distributions() if one.name} if TABLE else {}


def pinned(path: str) -> set[str]:
    return {re.sub(r" *;.*", "", line) for line in SCRIPT["pins"](path)}


@pytest.mark.parametrize("image", TABLE["images"])
def test_the_table_has_the_versions_that_the_image_installs(image: str) -> None:
    listed = {f"{name}=={TABLE['packages'][name][0]}" for name in TABLE["images"][image]}
    # TPUs' own library comes in the version that torch_xla was made for.
    assert listed - pinned(SCRIPT["wanted"]()[image][1]) == set()


@pytest.mark.parametrize("image", ["tpu-trainer", "tpu-examples"])
def test_an_image_holds_what_its_packages_require(image: str) -> None:
    """The environment of the tests is made from the same constraints."""
    found, waiting = set[tuple[str, str]](), deque(Requirement(text) for text in SCRIPT["wanted"]()[image][0])
    while waiting:
        wanted = waiting.popleft()
        for one in {(canonicalize_name(wanted.name), extra) for extra in ("", *wanted.extras)} - found:
            found.add(one)
            requires = [Requirement(text) for text in INSTALLED[one[0]].requires or ()]
            waiting += [each for each in requires if each.marker is None or each.marker.evaluate({"extra": one[1]})]
    assert set(TABLE["images"][image]) == {name for name, _ in found}


def test_the_modules_are_those_of_the_installed_packages() -> None:
    modules: dict[str, set[str]] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners if module.isidentifier() and not module.startswith("_") else ():
            modules.setdefault(canonicalize_name(owner), set()).add(module)
    here = {name: about for name, about in TABLE["packages"].items() if name in INSTALLED}
    assert len(here) > 80
    assert {name: set(about[1]) for name, about in here.items()} == {name: modules.get(name, set()) for name in here}
