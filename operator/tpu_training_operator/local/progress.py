"""Follows the progress file of worker 0. Used by `local.run`; the lines are those of `tpu_trainer.progress`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError


@dataclass(frozen=True)
class Evaluation:
    """The metrics of the model after `step` steps; None where one was no finite number."""

    step: int
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """One line of the progress file. `losses` are the global losses of the steps since the report before; None is a
    loss that was no finite number. `evaluation`: the step that was evaluated, and the metrics after it."""

    phase: str
    step: int
    total_steps: int
    loss: float | None = None
    losses: tuple[float | None, ...] = ()
    examples_per_second: float | None = None
    evaluation: Evaluation | None = None


@dataclass
class ProgressFollower:
    """Reads what was appended since the last look, whole lines only; a line that is no report is passed over."""

    path: Path
    _offset: int = field(default=0, repr=False)

    def new_reports(self) -> list[Report]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(_reports(whole.splitlines()))


class _Line(BaseModel):
    """A line as it stands in the file."""

    phase: str
    step: int
    total_steps: int = Field(alias="totalSteps")
    loss: float | None = None
    losses: tuple[float | None, ...] = ()
    examples_per_second: float | None = Field(None, alias="examplesPerSecond")
    evaluation: dict[str, float | None] | None = None


def _reports(lines: list[bytes]) -> Iterator[Report]:
    for text in lines:
        try:
            line = _Line.model_validate_json(text)
        except ValidationError:
            # A loop of the user's own may write here, too, and whatever it likes.
            continue
        yield Report(
            phase=line.phase,
            step=line.step,
            total_steps=line.total_steps,
            loss=line.loss,
            losses=line.losses,
            examples_per_second=line.examples_per_second,
            evaluation=_evaluation(line.evaluation),
        )


def _evaluation(record: dict[str, float | None] | None) -> Evaluation | None:
    if record is None or record.get("step") is None:
        return None
    return Evaluation(int(record["step"] or 0), {name: value for name, value in record.items() if name != "step"})
