"""The format of COMMIT, the object that is written last and makes a checkpoint of the others, and of their names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import google_crc32c

from tpu_trainer.checkpoint.parts import WHOLE, file_of

COMMIT = "COMMIT"
WHOLE_FILES, PARTS = 1, 2
"""Formats. The second has files in parts, which a trainer that knows only the first would miss."""

Evaluation = Mapping[str, float | None]
"""The metrics of an evaluation; None for a value that is not finite, which JSON cannot hold."""

_FOLDER = re.compile(r"step-([0-9]{8,12})-([0-9A-Za-z]{1,8})-([0-9]{1,6})")


class OtherFormatError(ValueError):
    """Another version of the trainer wrote the COMMIT."""


@dataclass(frozen=True)
class Author:
    """One attempt of one job. `world`: processes. `global_batch`: examples per step.

    `name`: "namespace/name". `recipe`: what the user wrote, before scaling. Both are empty in a COMMIT of version
    0.1.0. `code`: the sha256 of trainer.code, empty if the image brought the code.
    """

    uid: str
    attempt: int
    fingerprint: str
    world: int
    global_batch: int
    name: str = ""
    recipe: Mapping[str, str] = field(default_factory=dict)
    code: str = ""

    @property
    def job(self) -> str:
        """Returns the job's part of a folder's name: enough of its uid to distinguish the jobs of one directory."""
        return re.sub("[^0-9A-Za-z]", "", self.uid)[:8] or "0"

    def __str__(self) -> str:
        return f"{self.name or f'with uid {self.uid}'}, attempt {self.attempt}"

    def may_continue(self, other: Author) -> bool:
        """Returns whether this job continues `other`'s checkpoints unasked: they are its own, or belong to a job of the
        same name and recipe that was deleted and created again."""
        return self.uid == other.uid or (self.is_namesake(other) and self.recipe == other.recipe)

    def is_namesake(self, other: Author) -> bool:
        return self.name != "" and self.name == other.name


@dataclass(frozen=True)
class Folder:
    """The name of a checkpoint. It contains the writer, so that two writers never share a file."""

    step: int
    job: str
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step:08}-{self.job}-{self.attempt}"

    @classmethod
    def parse(cls, name: str) -> Folder | None:
        """Returns None if it is not the name of a checkpoint."""
        match = _FOLDER.fullmatch(name)
        return cls(int(match[1]), match[2], int(match[3])) if match else None


@dataclass(frozen=True)
class Mark:
    """A file's size in bytes and the CRC-32C (RFC 3720) of its content."""

    size: int
    crc32c: int

    @classmethod
    def of(cls, data: bytes) -> Mark:
        return cls(len(data), google_crc32c.value(data))


@dataclass(frozen=True)
class Commit:
    """What a COMMIT states about its checkpoint.

    step, examples: as in the snapshot. files: all of them, by name. clean: losses and gradients were finite in all
    steps so far; a COMMIT without the field counts as clean. evaluation: of the same step, with checkpoint.keepBest.
    weights: the checksum of the model (`last_weights`); empty where none was computed.
    """

    step: int
    examples: int
    author: Author
    files: Mapping[str, Mark]
    clean: bool = True
    evaluation: Evaluation | None = None
    weights: str = ""

    def to_json(self) -> bytes:
        files = {name: asdict(mark) for name, mark in self.files.items()}
        version = WHOLE_FILES if all(name == _whole(name) for name in files) else PARTS
        document: dict[str, Any] = {"format": version, "step": self.step, "examples": self.examples, "files": files}
        author = asdict(self.author)
        # Not in the author: an older trainer takes an author with an unknown field for damage.
        if code := author.pop("code"):
            document["code"] = code
        document |= {"author": author, "clean": self.clean}
        if self.weights:
            document["weights"] = self.weights
        if self.evaluation is not None:
            document["evaluation"] = dict(self.evaluation)
        return json.dumps(document, indent=1, sort_keys=True).encode()

    @classmethod
    def parse(cls, data: bytes) -> Commit:
        """Parses a COMMIT. Raises ValueError (or its subclass OtherFormatError), whose text says what is wrong."""
        try:
            document = json.loads(data)
            version = document["format"]
            if version in (WHOLE_FILES, PARTS):
                marks = document["files"].items()
                files = {name: Mark(int(mark["size"]), int(mark["crc32c"])) for name, mark in marks}
                # A later version may write more fields.
                names = {field.name for field in fields(Author)}
                known = {name: value for name, value in document["author"].items() if name in names}
                author = Author(**known | {"code": str(document.get("code", ""))})
                clean = bool(document.get("clean", True))
                evaluation = document.get("evaluation")
                numbers = evaluation and {name: value and float(value) for name, value in evaluation.items()}
                weights = str(document.get("weights", ""))
                return cls(int(document["step"]), int(document["examples"]), author, files, clean, numbers, weights)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("COMMIT is cut off, or not a COMMIT") from error
        raise OtherFormatError(f"COMMIT is of format {version}, this trainer reads formats up to {PARTS}")


def _whole(name: str) -> str:
    file = file_of(name)
    return name if file is None else WHOLE.name(file)
