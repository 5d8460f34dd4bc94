"""Writes which packages the trainer's images hold, and which modules each brings: what `tpujob submit` compares a
folder's imports with. Run by `make lock`, because it installs each image's packages into an environment of its own.
`extras` prints the requirements of that image, which `make lock` pins.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "operator/tpu_training_operator/cli/code/image_contents.json"
_EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
_MODULES = """
import importlib.metadata as metadata, json
modules = {}
for module, owners in metadata.packages_distributions().items():
    for owner in owners if module.isidentifier() and not module.startswith("_") else ():
        modules.setdefault(owner, set()).add(module)
print(json.dumps({one.name: [one.version, sorted(modules.get(one.name, ()))] for one in metadata.distributions()}))
"""


def wanted() -> dict[str, tuple[list[str], str]]:
    """Returns the requirements of each image and the file that pins them. The Dockerfiles install the same names."""
    trainer = [*_EXTRAS["trainer"], "uv"]
    more = [
        line
        for line in (ROOT / "trainer_image/extras/packages.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    return {
        "tpu-trainer": (trainer, "constraints.txt"),
        "tpu-examples": ([*trainer, *_EXTRAS["examples"]], "constraints.txt"),
        "tpu-trainer-extras": ([*trainer, *more], "constraints.extras.txt"),
    }


def pins(path: str) -> list[str]:
    """Returns the lines of a constraints file without their hashes."""
    lines = (ROOT / path).read_text().splitlines()
    return [line.rstrip(" \\") for line in lines if line and not line.startswith((" ", "#"))]


def table(contents: dict[str, dict[str, tuple[str, list[str]]]]) -> str:
    """Formats the table: the packages with their versions and modules, and the names of the packages by image."""
    packages = {name: about for held in contents.values() for name, about in held.items()}
    lines = (f"  {json.dumps(name)}: {json.dumps(packages[name])}" for name in sorted(packages))
    images = (f"  {json.dumps(image)}: {json.dumps(sorted(held))}" for image, held in contents.items())
    return '{"packages": {\n' + ",\n".join(lines) + '\n}, "images": {\n' + ",\n".join(images) + "\n}}\n"


def _install(requirements: list[str], constraints: str, into: Path) -> dict[str, Any]:
    (into / "wanted.txt").write_text("\n".join(requirements))
    (into / "pins.txt").write_text("\n".join(pins(constraints)))
    uv, python = str(Path(sys.executable).with_name("uv")), str(into / "venv/bin/python")
    subprocess.run([uv, "venv", "--quiet", f"--python={sys.executable}", str(into / "venv")], check=True)
    install = ["pip", "install", "--quiet", f"--python={python}", "-r", "wanted.txt", "-c", "pins.txt"]
    subprocess.run([uv, *install], cwd=into, check=True)
    told = json.loads(subprocess.run([python, "-c", _MODULES], check=True, capture_output=True).stdout)
    return {re.sub(r"[-_.]+", "-", name).lower(): about for name, about in told.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["extras"]:
        print("\n".join(wanted()["tpu-trainer-extras"][0]))
        sys.exit()
    contents = {}
    for image, (requirements, constraints) in wanted().items():
        with tempfile.TemporaryDirectory() as folder:
            contents[image] = _install(requirements, constraints, Path(folder))
    TABLE.write_text(table(contents))
