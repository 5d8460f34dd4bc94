"""Reads the results of `tpujob compile-check -o json` for `tpujob plan --compile-results FILE`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tpu_training_operator.domain.job.recipe.compile_results import gib, milliseconds
from tpu_training_operator.domain.job.recipe.resolve import Resolution

OPTION = "--compile-results"


@dataclass(frozen=True)
class CompiledStep:
    """One compiled step, as text. `memory`: such as "5.38 of 15.75 GiB"; `verdict`: whether it fits; `at_best`: the
    step's shortest time, "" if unknown; `bound`: what limits it."""

    memory: str
    verdict: str
    at_best: str
    bound: str


class CompiledSteps:
    """The compile results in a file, by slice and batch."""

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_bytes())
            self._answers = {_key(answer): _step(answer) for answer in _all_answers(content)}
        except OSError as error:
            raise click.UsageError(f"{OPTION} {path}: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            expected = "what `tpujob compile-check -o json` prints"
            raise click.UsageError(f"{OPTION} {path}: expected {expected}, got something else") from None

    def of(self, resolution: Resolution) -> CompiledStep | None:
        """Returns the step for this slice and batch; None if it was not compiled."""
        batch = resolution.recipe.batch
        return self._answers.get((str(resolution.layout), batch.per_replica, batch.accumulation))

    def lines(self, resolutions: Sequence[Resolution]) -> dict[str, list[str]]:
        """Returns the rows of a comparison: each row's name, and its value for each resolution."""
        steps = [self.of(resolution) for resolution in resolutions]
        return {
            "compiled": ["no" if step is None else step.verdict for step in steps],
            "HBM": ["-" if step is None else step.memory for step in steps],
            "step at best": ["-" if step is None or not step.at_best else step.at_best for step in steps],
        }


def _all_answers(content: Any) -> Iterator[Mapping[str, Any]]:
    for answer in content if isinstance(content, list) else [content]:
        yield answer
        yield from answer.get("alternatives", ())


def _key(answer: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(answer["slice"]), int(answer["batch"]["perReplica"]), int(answer["batch"].get("accumulation", 1))


def _step(answer: Mapping[str, Any]) -> CompiledStep:
    memory, best = answer.get("memory", {}), answer.get("atBest")
    verdict = {True: "fits", False: "does not fit", None: "unknown"}[answer["fits"]]
    needed, limit = memory.get("needed"), memory.get("limit")
    used = "-" if needed is None else gib(needed)
    return CompiledStep(
        used if limit is None else f"{used} of {gib(limit)}",
        verdict,
        "" if best is None else milliseconds(best["stepSeconds"]),
        "" if best is None else f"bound by {best['boundBy']}, MFU at most {best['modelFlopsUtilisation']:.0%}",
    )
