"""`tpujob plan --compile-results FILE`: what `tpujob compile-check -o json` found, beside the numbers of the plan."""

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
    """`memory`: "5.38 of 15.75 GiB"; `verdict`: fits or not; `at_best`: the step's shortest time, "" if unknown;
    `bound`: by what."""

    memory: str
    verdict: str
    at_best: str
    bound: str


class CompiledSteps:
    """The answers in a file, one for each slice and batch."""

    def __init__(self, path: Path) -> None:
        try:
            found = json.loads(path.read_bytes())
            self._answers = {_key(answer): _step(answer) for answer in _all_answers(found)}
        except OSError as error:
            raise click.UsageError(f"{OPTION} {path}: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            expected = "what `tpujob compile-check -o json` prints"
            raise click.UsageError(f"{OPTION} {path}: expected {expected}, got something else") from None

    def of(self, resolution: Resolution) -> CompiledStep | None:
        """None if this slice was not compiled, or another batch."""
        batch = resolution.recipe.batch
        return self._answers.get((str(resolution.layout), batch.per_replica, batch.accumulation))

    def lines(self, resolutions: Sequence[Resolution]) -> dict[str, list[str]]:
        """A row's name, and its value for each of them."""
        found = [self.of(resolution) for resolution in resolutions]
        return {
            "compiled": ["no" if answer is None else answer.verdict for answer in found],
            "HBM": ["-" if answer is None else answer.memory for answer in found],
            "step at best": ["-" if answer is None or not answer.at_best else answer.at_best for answer in found],
        }


def _all_answers(found: Any) -> Iterator[Mapping[str, Any]]:
    for answer in found if isinstance(found, list) else [found]:
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
