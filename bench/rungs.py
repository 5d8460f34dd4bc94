"""How often the gates of a ladder that look at losses pass (docs/ladder.md), on rungs of examples/digits.py.

    python -m bench.rungs [--seeds N] [--workers N] [--docs docs/ladder.md]

The planner scales the recipe to each rung, the trainer's own loop trains it on one replica, and the operator judges
what the trainer reports.
"""

import argparse
import io
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.recipes.runs import CHIP, as_one_replica, trained
from bench.scale.tables import markdown
from bench.trainer.tables import filled_in
from tpu_trainer.contract.outcome import termination_message
from tpu_training_operator.api.ladder import Gates
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.rung_gates import Pace, judge
from tpu_training_operator.domain.job.rung_losses import compare, loss_points
from tpu_training_operator.domain.job.rungs import lower_rungs_of
from tpu_training_operator.domain.job.trainer_report import LastWords, read_last_words
from tpu_training_operator.domain.objects.run_spec import run_spec


@dataclass(frozen=True)
class RungRun:
    """A rung on `chips` times the tuned slice. `rate`: the tuned one, for batch 32, which is scaled linearly."""

    chips: int
    steps: int
    rate: str = "0.05"
    seed: int = 0

    @property
    def batch(self) -> int:
        return 32 * self.chips

    @property
    def words(self) -> str:
        return f"batch {self.batch}, {self.steps} steps, rate {float(self.rate) * self.chips:g}"


HEALTHY = [RungRun(chips, steps) for chips in (1, 2, 4) for steps in (10, 15, 20, 30)]
HOPELESS = [RungRun(chips, steps, "1e-12") for chips in (1, 4) for steps in (10, 60, 200)]
TOO_FAST = [RungRun(16, 60, "0.1")]
TOLERANCE = 0.05
PAIRS = [
    (RungRun(1, 100), RungRun(4, 60)),
    (RungRun(1, 200), RungRun(2, 60)),
    (RungRun(1, 200), RungRun(4, 60)),
    (RungRun(1, 200, "0.1"), RungRun(4, 60, "0.1")),
    (RungRun(4, 200, "0.1"), RungRun(16, 40, "0.1")),
]


def train(run: RungRun) -> LastWords:
    """Trains the rung, and returns what its worker 0 says at the end."""
    torch.set_num_threads(1)
    (rung,) = lower_rungs_of(parse_job(_job(run)))
    document = as_one_replica(json.loads(json.dumps(run_spec(rung.job, rung.resolution, attempt=1))))
    with tempfile.TemporaryDirectory() as directory:
        outcome = trained(document, Path(directory), io.StringIO())
    words = read_last_words(termination_message(outcome).decode())
    if words is None or words.rung is None:
        raise RuntimeError(outcome.message)
    return words


def _job(run: RungRun) -> dict[str, Any]:
    slice_ = {**CHIP, "count": run.chips, "hardware": "CPU"}
    return {
        "apiVersion": "tpu-operator.dev/v1alpha1",
        "kind": "TPUTrainingJob",
        "metadata": {"name": "bench", "namespace": "bench", "uid": "bench"},
        "spec": {
            "slice": slice_,
            "ladder": {"rungs": [{"slice": slice_, "steps": run.steps}]},
            "trainer": {"image": "bench", "entrypoint": "examples.digits:task", "backend": "Torch"},
            "recipe": {
                "tunedOn": CHIP,
                "globalBatchSize": 32,
                "trainSteps": 6400,
                "warmupSteps": 80,
                "seed": run.seed,
                "optimizer": {"name": "sgd", "learningRate": run.rate, "momentum": 0.9, "weightDecay": 0.0001},
                "scaling": {"learningRate": "Linear"},
            },
        },
    }


def falls(words: LastWords, run: RungRun) -> str:
    """Returns what `lossFalls` says of the rung: passed, cannot tell, rose, or fell not."""
    (result,) = judge(_gates(lossFalls=True), run.steps, words, Pace(None, 1), None)
    if result.passed:
        return "passed"
    return next((kind for kind in ("cannot tell", "rose") if kind in result.message), "did not fall")


def excess(here: tuple[RungRun, LastWords], before: tuple[RungRun, LastWords]) -> tuple[float, bool]:
    """Returns by how much the loss of a rung is above that of the one before, and whether `lossFollows` passes."""
    losses = [loss_points(words.rung.curve, run.batch) for run, words in (here, before)]
    difference = compare(*losses)
    assert difference is not None
    gates = _gates(lossFollows={"tolerance": TOLERANCE})
    (result,) = judge(gates, here[0].steps, here[1], Pace(None, 1), None, difference)
    return difference.excess, result.passed


def _gates(**asked: Any) -> Gates:
    off = {"lossFalls": False, "finite": False, "noRecompilation": False, "minEfficiency": 0}
    return Gates.model_validate(off | asked)


def falls_table(runs: Sequence[RungRun], measured: dict[RungRun, list[LastWords]]) -> str:
    rows = [["rung", "passed", "cannot tell", "did not fall", "rose"]]
    for run in runs:
        verdicts = [falls(words, run) for words in measured[run]]
        rows.append([run.words, *(f"{100 * verdicts.count(kind) / len(verdicts):.0f} %" for kind in rows[0][1:])])
    return markdown(rows)


def follows_table(measured: dict[RungRun, list[LastWords]]) -> str:
    rows = [["rung before", "this rung", "difference of the losses", "fails"]]
    for before, here in PAIRS:
        both = zip(measured[here], measured[before], strict=True)
        found = [excess((here, words), (before, earlier)) for words, earlier in both]
        failed = sum(not passed for _, passed in found) / len(found)
        rows.append([before.words, here.words, f"{fmean(value for value, _ in found):.2f}", f"{100 * failed:.0f} %"])
    return markdown(rows)


def _seeded(runs: Sequence[RungRun], seeds: int) -> Iterator[RungRun]:
    for run in runs:
        # Two rungs of one pair do not see the same batches.
        yield from (RungRun(run.chips, run.steps, run.rate, 1000 * run.chips + seed) for seed in range(seeds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=100, help="rungs of each kind; default 100")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with one thread; default 2")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page's tables")
    options = parser.parse_args()
    runs = list(dict.fromkeys([*HEALTHY, *HOPELESS, *TOO_FAST, *(run for pair in PAIRS for run in pair)]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(options.workers) as pool:
        words = iter(pool.map(train, list(_seeded(runs, options.seeds)), chunksize=8))
    measured = {run: list(islice(words, options.seeds)) for run in runs}
    texts = {
        "falls": falls_table([*HEALTHY, *TOO_FAST], measured),
        "hopeless": falls_table(HOPELESS, measured),
        "follows": follows_table(measured),
    }
    for text in texts.values():
        print(f"\n{text}")
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        for name, text in texts.items():
            page = filled_in(page, name, text)
        options.docs.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
