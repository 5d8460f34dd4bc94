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
            self._answers = {_key(one): _step(one) for one in _all(found)}
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
            "compiled": ["no" if one is None else one.verdict for one in found],
            "HBM": ["-" if one is None else one.memory for one in found],
            "step at best": ["-" if one is None or not one.at_best else one.at_best for one in found],
        }


def _all(found: Any) -> Iterator[Mapping[str, Any]]:
    for one in found if isinstance(found, list) else [found]:
        yield one
        yield from one.get("alternatives", ())


def _key(one: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(one["slice"]), int(one["batch"]["perReplica"]), int(one["batch"].get("accumulation", 1))


def _step(one: Mapping[str, Any]) -> CompiledStep:
    memory, best = one.get("memory", {}), one.get("atBest")
    verdict = {True: "fits", False: "does not fit", None: "unknown"}[one["fits"]]
    needed, limit = memory.get("needed"), memory.get("limit")
    used = "-" if needed is None else gib(needed)
    return CompiledStep(
        used if limit is None else f"{used} of {gib(limit)}",
        verdict,
        "" if best is None else milliseconds(best["stepSeconds"]),
        "" if best is None else f"bound by {best['boundBy']}, MFU at most {best['modelFlopsUtilisation']:.0%}",
    )
