"""Reads the requirements.txt of a folder of code, which the workers install.

uv is the judge of the file. This reads what `tpujob` compares with an image and with this machine.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tpu_contract.protocol import REQUIREMENTS_FILE

# Options that name no package.
_PLACES = ("--extra-index-url", "--find-links", "--index-url", "--no-index", "--pre", "-f", "-i")
_COMMENT, _OPTION = re.compile(r"(^|\s+)#.*"), re.compile(r"\s+--?[a-z].*")
# Where the markers of a requirement are true: in the trainer's image.
_IN_IMAGE = {
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "python_full_version": "3.11.0",
    "python_version": "3.11",
    "sys_platform": "linux",
}


@dataclass(frozen=True)
class Requirements:
    """What a file asks for. `is_whole`: every line was understood; the others may bring any module."""

    listed: tuple[Requirement, ...] = ()
    is_whole: bool = True

    def of_image(self) -> dict[str, Requirement]:
        """Returns what is installed in the image, by the name's normal form."""
        return self._where(_IN_IMAGE)

    def _where(self, environment: Mapping[str, str]) -> dict[str, Requirement]:
        found: dict[str, Requirement] = {}
        for one in self.listed:
            if one.marker is None or one.marker.evaluate(dict(environment)):
                # All lines of a package hold at once.
                wanted = found.setdefault(canonicalize_name(one.name), Requirement(str(one)))
                wanted.specifier &= one.specifier
        return found

    def missing_here(self) -> Iterator[str]:
        """Yields each requirement that this Python does not fulfil, and what it has instead."""
        for name, wanted in self._where(default_environment()).items():  # type: ignore[arg-type]
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                yield f"{wanted.name}{wanted.specifier}"
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                yield f"{wanted.name}{wanted.specifier} (here: {version})"


def read_requirements(folder: Path) -> Requirements:
    """Reads the file of the folder, which may lack one. Raises OSError."""
    path = folder / REQUIREMENTS_FILE
    if not path.is_file():
        return Requirements()
    listed, is_whole = list[Requirement](), True
    for raw in path.read_text(encoding="utf-8-sig", errors="replace").replace("\\\n", " ").splitlines():
        line = _COMMENT.sub("", raw).strip()
        if not line:
            continue
        if line.startswith("-"):
            is_whole = is_whole and line.startswith(_PLACES)
            continue
        try:
            listed.append(_parse(_OPTION.sub("", line)))
        except (KeyError, ValueError):
            # A path, an address, or a mistake that uv explains.
            is_whole = False
    return Requirements(tuple(listed), is_whole)


def _parse(text: str) -> Requirement:
    """Raises ValueError, or KeyError for an unknown marker, also if the requirement cannot be compared."""
    requirement = Requirement(text)
    requirement.specifier.contains("1")
    if requirement.marker is not None:
        requirement.marker.evaluate(dict(_IN_IMAGE))
    return requirement
