"""The compared runs: which loop, on which model, for how long, with what switched on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.trainer import ours
from bench.trainer.models import MODELS
from bench.trainer.names import CHECKPOINT_EVERY, OUR_FEED, OURS, PLAIN, PLAIN_PAIR
from bench.trainer.observed import doctor_cost
from bench.trainer.process import Line, watch
from bench.trainer.reports import NotComparable, Pace, check_learned, pace, parse

DOCTOR_HOSTS = 2
"""Two, because most of the doctor's work is comparing replicas."""


@dataclass(frozen=True)
class Feature:
    """What the run spec says if the feature is on (partly with the run's directory), and what it leaves behind.

    `trace`: a file and text in it, which prove that the feature was on; otherwise it would seem to cost nothing.
    """

    fields: Callable[[Path], dict[str, Any]]
    trace: tuple[str, bytes]
    hosts: int = 1


_HISTORY = ("history.json", b"")
FEATURES = {
    PLAIN: Feature(lambda directory: {}, _HISTORY),
    PLAIN_PAIR: Feature(lambda directory: {}, _HISTORY, hosts=2),
    "checkpoint": Feature(
        lambda directory: {"checkpoint": {"uri": str(directory), "everySteps": CHECKPOINT_EVERY, "keep": 3}},
        ("step-*/COMMIT", b""),
    ),
    "tensorboard": Feature(lambda directory: {"report": {"tensorBoard": True}}, ("events.out.tfevents.*", b"")),
    "noise-scale": Feature(
        lambda directory: {"report": {"gradientNoiseScale": True}},
        ("history.json", b'"noise_scale": '),
        hosts=2,
    ),
}


@dataclass(frozen=True)
class Length:
    """Steps that are not timed, for compilations and caches, and the steps that are."""

    warm_up: int
    timed: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed


def pace_of_loop(loop: str, model: str, length: Length) -> Pace:
    """Returns the pace of one run."""
    if loop == OURS:
        return pace_of_feature(PLAIN, model, length)
    lines = watch("bench.trainer.contender", [loop, model, str(length.steps)], {})
    return _pace(lines, model, length)


def pace_of_feature(name: str, model: str, length: Length) -> Pace:
    """Returns the pace of one run of this trainer with one feature switched on, or with none."""
    feature = FEATURES[name]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        spec = ours.run_spec(model, length.steps, feature.hosts, **feature.fields(directory))
        lines = watch("tpu_trainer", [], *ours.environments(spec, directory))
        file, text = feature.trace
        if not any(text in found.read_bytes() for found in directory.glob(file)):
            raise NotComparable(f"{name} has left no {file} with {text.decode()!r} behind: it was not on")
    return _pace(lines, model, length)


def pace_of_feed(feed: str, model: str, length: Length) -> Pace:
    """Returns the pace of batches without a training."""
    # What a worker sets before it imports torch.
    environment = {"OMP_WAIT_POLICY": "passive"} if feed == OUR_FEED else {}
    lines = watch("bench.trainer.contender", [feed, model, str(length.steps)], environment)
    return pace([report for line in lines if (report := parse(line))], length.warm_up)


def cost_of_doctor(model: str, length: Length) -> dict[str, Any]:
    """Returns the time that the doctor of host 0 reports in a gang of DOCTOR_HOSTS, including waiting for the
    others."""
    with tempfile.TemporaryDirectory() as name:
        spec = ours.run_spec(model, length.steps, DOCTOR_HOSTS)
        lines = watch("bench.trainer.observed", [], *ours.environments(spec, Path(name)))
    _pace(lines, model, length)
    return doctor_cost(lines, length.warm_up)


def _pace(lines: list[Line], model: str, length: Length) -> Pace:
    reports = [report for line in lines if (report := parse(line))]
    found = pace(reports, length.warm_up)
    check_learned(reports, MODELS[model].chance)
    return found
