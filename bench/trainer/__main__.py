"""How fast this trainer's loop is compared with others, and what its parts cost (docs/performance.md).

    python -m bench.trainer [--quick] [--rounds 9] [--steps 800]
        [--parts mlp transformer deep images features doctor] [--docs docs/performance.md]

Every run is a separate process on XLA's CPU device; runs alternate. Prints tables, then all numbers as JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.trainer.compare import interleaved
from bench.trainer.images import written
from bench.trainer.names import BY_HAND, FEEDS, LOOPS
from bench.trainer.reports import NotComparable, Pace
from bench.trainer.runs import (
    DOCTOR_HOSTS,
    FEATURES,
    Length,
    cost_of_doctor,
    pace_of_feature,
    pace_of_feed,
    pace_of_loop,
)
from bench.trainer.tables import doctor_table, features_table, filled_in, images_table, loops_table, machine_line

PACKAGES = ("torch", "torch_xla", "pytorch-lightning", "accelerate", "pillow")
SMALL = "mlp"
"""Fixed costs of a step show most with the smaller model, so features and doctor are measured with it."""


@dataclass(frozen=True)
class Part:
    """One table: the length of its runs, the number of rounds, and the length of the single round of `--quick`."""

    length: Length
    rounds: int
    quick: Length
    measure: Callable[[Length, int], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]


def of_loops(model: str, length: Length, rounds: int) -> dict[str, Any]:
    paces = interleaved(list(LOOPS), rounds, lambda loop: told(model, loop, pace_of_loop(loop, model, length)))
    return {"model": model, **by_kind(paces)}


def of_images(length: Length, rounds: int) -> dict[str, Any]:
    model = "images"
    with written():
        loops = interleaved(BY_HAND, rounds, lambda loop: told(model, loop, pace_of_loop(loop, model, length)))
        feeds = interleaved(list(FEEDS), rounds, lambda feed: told(model, feed, pace_of_feed(feed, model, length)))
    return {"model": model, "loops": by_kind(loops), "feeds": by_kind(feeds)}


def of_features(length: Length, rounds: int) -> dict[str, Any]:
    paces = interleaved(list(FEATURES), rounds, lambda name: told(SMALL, name, pace_of_feature(name, SMALL, length)))
    return {"model": SMALL, **by_kind(paces)}


def of_doctor(length: Length, rounds: int) -> dict[str, Any]:
    return {"model": SMALL, "hosts": DOCTOR_HOSTS, "runs": [cost_of_doctor(SMALL, length) for _ in range(rounds)]}


def by_kind(paces: dict[str, list[Pace]]) -> dict[str, Any]:
    return {
        "stepsPerSecond": {name: [pace.steps_per_second for pace in found] for name, found in paces.items()},
        "hostMilliseconds": {name: [pace.host for pace in found] for name, found in paces.items()},
    }


def told(model: str, name: str, pace: Pace) -> Pace:
    print(
        f"{model}: {name} {pace.steps_per_second:.1f} steps/s, {pace.host:.1f} ms of the host",
        file=sys.stderr,
        flush=True,
    )
    return pace


PARTS = {
    "mlp": Part(Length(50, 400), 5, Length(20, 80), partial(of_loops, "mlp"), loops_table),
    "transformer": Part(Length(10, 50), 3, Length(10, 20), partial(of_loops, "transformer"), loops_table),
    "deep": Part(Length(10, 50), 3, Length(10, 20), partial(of_loops, "deep"), loops_table),
    # The warm-up uses up what was read ahead while the first step was compiled: 28 batches by torch_xla's loader.
    "images": Part(Length(180, 240), 3, Length(40, 20), of_images, images_table),
    "features": Part(Length(50, 400), 3, Length(20, 80), of_features, features_table),
    "doctor": Part(Length(50, 400), 3, Length(20, 180), of_doctor, doctor_table),
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def machine() -> dict[str, Any]:
    try:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        raise NotComparable(f"{error.name} is not installed; it comes with this project's extra `bench`") from None
    return {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(), **versions}


def results_of(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns all numbers, and the tables by the name of their place in the docs; prints each as soon as it is
    complete."""
    results: dict[str, Any] = {"machine": machine()}
    tables = {"machine": machine_line(results["machine"])}
    for name in options.parts:
        part = PARTS[name]
        length, rounds = (part.quick, 1) if options.quick else (part.length, part.rounds)
        length = Length(length.warm_up, options.steps or length.timed)
        measured = part.measure(length, options.rounds or rounds)
        results[name] = {"warmUp": length.warm_up, "steps": length.timed, **measured}
        tables[name] = part.table(results[name])
        print(f"\n{tables[name]}\n", flush=True)
    return results, tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round of short runs: does it work?")
    parser.add_argument("--rounds", type=positive, help="instead of each part's own number")
    parser.add_argument("--steps", type=positive, help="timed steps of a run, instead of each part's own number")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the tables into this file")
    options = parser.parse_args()
    # The default would leave the run's processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        results, tables = results_of(options)
    except NotComparable as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(results, indent=1))
    if options.docs is not None:
        document = options.docs.read_text(encoding="utf-8")
        for name, text in tables.items():
            document = filled_in(document, name, text)
        options.docs.write_text(document, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
