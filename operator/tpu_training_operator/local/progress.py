"""Follows the progress file of worker 0. Used by `local.run`; the lines are those of `tpu_trainer.progress`."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from tpu_training_operator.api.text import plain_json


@dataclass(frozen=True)
class Evaluation:
    """The metrics of the model after `step` steps; None where one was no finite number."""

    step: int
    metrics: dict[str, float | None]


def _evaluation(record: object) -> object:
    """{"step": 10, "accuracy": 0.9} as the fields of Evaluation."""
    if not isinstance(record, dict):
        return record
    return {"step": record.get("step"), "metrics": {name: value for name, value in record.items() if name != "step"}}


@dataclass(frozen=True)
class Report:
    """One line of the progress file. `losses` are the global losses of the steps since the report before; None is a
    loss that was no finite number. `evaluation`: the step that was evaluated, and the metrics after it. `warnings`:
    what slows the training down or endangers it, for a person. `checkpoint_step`: the step that was saved last."""

    __pydantic_config__ = ConfigDict(alias_generator=to_camel)

    phase: str
    step: int
    total_steps: int
    loss: float | None = None
    losses: tuple[float | None, ...] = ()
    examples_per_second: float | None = None
    evaluation: Annotated[Evaluation | None, BeforeValidator(_evaluation)] = None
    warnings: tuple[str, ...] = ()
    checkpoint_step: int | None = None


_REPORT = TypeAdapter(Report)


@dataclass
class ProgressFollower:
    """Reads what was appended since the last look, whole lines only; a line that is no report is passed over."""

    path: Path
    _offset: int = field(default=0, repr=False)

    @property
    def has_said(self) -> bool:
        return self._offset > 0

    def new_reports(self) -> list[Report]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(_reports(whole.splitlines()))


def _reports(lines: list[bytes]) -> Iterator[Report]:
    for line in lines:
        # A loop of the user's own may write here, too, and whatever it likes.
        with suppress(ValidationError, ValueError, RecursionError):
            yield _REPORT.validate_python(plain_json(json.loads(line)))
