"""Reads the results of `tpujob compile-check -o json` for `tpujob plan --compile-results FILE`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.domain.job.recipe.compile_results import CompileResult
from tpu_training_operator.domain.job.recipe.cost import AT_BEST, StepTime
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.trainer_report import CompiledStep

OPTION = "--compile-results"


class CompiledSteps:
    """The compile results in a file, by slice and batch."""

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_bytes())
            self._answers = {_key(answer): CompiledStep.model_validate(answer) for answer in _all_answers(content)}
        except OSError as error:
            raise click.UsageError(f"{OPTION} {path}: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            expected = "what `tpujob compile-check -o json` prints"
            raise click.UsageError(f"{OPTION} {path}: expected {expected}, got something else") from None

    def of(self, resolution: Resolution) -> CompileResult | None:
        """Returns the result for this slice and batch; None if it was not compiled."""
        batch = resolution.recipe.batch
        step = self._answers.get((str(resolution.layout), batch.per_replica, batch.accumulation))
        return None if step is None else CompileResult(resolution.layout, step)

    def times(self, resolutions: Iterable[Resolution]) -> list[StepTime]:
        """Returns the shortest times that a step can take on the slices that were compiled."""
        bounds = [(on, result.bound) for on in resolutions if (result := self.of(on)) is not None]
        return [StepTime.of(on, bound.seconds, AT_BEST) for on, bound in bounds if bound is not None]

    def lines(self, resolutions: Sequence[Resolution]) -> dict[str, list[str]]:
        """Returns the rows of a comparison: each row's name, and its value for each resolution."""
        results = [self.of(resolution) for resolution in resolutions]
        return {
            "compiled": ["no" if result is None else result.short_verdict for result in results],
            "HBM": ["-" if result is None else result.memory for result in results],
            "step at best": ["-" if result is None else result.at_best[0] or "-" for result in results],
        }


def _all_answers(content: Any) -> Iterator[Mapping[str, Any]]:
    for answer in content if isinstance(content, list) else [content]:
        yield answer
        yield from answer.get("alternatives", ())


def _key(answer: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(answer["slice"]), int(answer["batch"]["perReplica"]), int(answer["batch"].get("accumulation", 1))
