"""Plans a run as `tpujob plan` does, and makes it in the trainer's own loop, in this process.

The job asks for `factor` slices of one chip. It runs on its alternative, one such slice, which makes the same steps of
the same batches with the same rates.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from bench.recipes.tasks import Rule, Task
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import SharedStop
from tpu_trainer.worker.replica import run_replica
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.cli.run.measure_noise import read_noise
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.objects.run_spec import run_spec

CHIP = {"acceleratorType": "v5litepod-1"}
_WARNING = "warning: "
# Where the run is, and how the plan was explained: they change nothing in the weights.
_NOT_COMPARED = ("job", "recipe", "scaling")


@dataclass(frozen=True)
class PlannedRun:
    """`document`: the run spec; `key`: equal for runs that compute the same; `warnings`: what the plan has said."""

    document: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def key(self) -> str:
        compared = {name: value for name, value in self.document.items() if name not in _NOT_COMPARED}
        return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16]


def tuned_run(task: Task, rate: str, seed: int, *, measures_noise: bool = False) -> PlannedRun:
    """Returns a run of the recipe on the slice that it is tuned on."""
    return _planned(_spec(task, 1, {**task.recipe(rate, seed), "tunedOn": CHIP}), measures_noise)


def scaled_run(task: Task, tuned: Mapping[str, Any], seed: int, factor: int, rule: Rule) -> PlannedRun:
    """Returns a run of the recipe as the planner scales it by a rule. `tuned`: what tuned.json has about the task."""
    if factor == 1:
        return tuned_run(task, tuned["learningRate"], seed)
    noise = {"gradientNoiseScale": tuned["gradientNoiseScale"]["value"]} if rule.knows_noise else {}
    recipe = {**task.recipe(tuned["learningRate"], seed), "tunedOn": CHIP, "scaling": dict(rule.scaling), **noise}
    spec = _spec(task, factor, recipe)
    spec["placement"] = {"alternatives": [{"slice": {**CHIP, "hardware": "CPU"}}]}
    return _planned(spec)


def _spec(task: Task, chips: int, recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "slice": {**CHIP, "count": chips, "hardware": "CPU"},
        "trainer": {"image": "bench", "entrypoint": f"bench.recipes.data:{task.entrypoint}", "backend": "Torch"},
        "recipe": recipe,
    }


def _planned(spec: dict[str, Any], measures_noise: bool = False) -> PlannedRun:
    if measures_noise:
        spec["report"] = {"gradientNoiseScale": True}
    head = {"apiVersion": "tpu-operator.dev/v1alpha1", "kind": "TPUTrainingJob"}
    name = {"name": "bench", "namespace": "bench", "uid": "bench"}
    own, *others = options_of(parse_job({**head, "metadata": name, "spec": spec}))
    runs = others[0] if others else own
    document = json.loads(json.dumps(run_spec(runs.job, runs.resolution, attempt=1)))
    if "adaScaleBatchSize" not in document:
        document = as_one_replica(document)
    return PlannedRun(document, own.resolution.warnings)


def as_one_replica(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the run spec for one replica, whose every step is one large pass: a chip might not hold it, but this
    machine does, and it is faster."""
    total = document["batch"]["global"]
    place = {**document["slice"], "slices": 1, "hosts": 1, "replicas": 1}
    return {**document, "slice": place, "batch": {"global": total, "perReplica": total, "accumulation": 1}}


def made(runs: Iterable[PlannedRun], known: dict[str, Any], workers: int, file: Path | None) -> None:
    """Makes the runs that are not in `known` yet, and adds their results to it, and to `file` one by one."""
    missing = {run.key: run.document for run in runs if run.key not in known}
    # Processes that share what they import: torch takes half a gigabyte.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(workers) as pool:
        for number, (key, result) in enumerate(pool.imap_unordered(_made, missing.items()), start=1):
            known[key] = result
            print(f"{number}/{len(missing)}: {result['message']}", file=sys.stderr, flush=True)
            if file is not None:
                file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _made(keyed: tuple[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Makes one run. Returns its metrics, or none if it has failed, its warnings, and what it cost."""
    key, document = keyed
    # Tiny tensors: more threads would only wait for each other.
    torch.set_num_threads(1)
    log, began = io.StringIO(), time.process_time()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        report = {"report": {**document["report"], "uri": name}} if "report" in document else {}
        outcome = trained({**document, **report}, directory, log)
        noise = read_noise((directory / "history.json").read_bytes()) if report else None
    if outcome.code not in (ExitCode.Succeeded, ExitCode.NotFinite, ExitCode.Diverged):
        raise RuntimeError(outcome.message)
    warnings = [line.removeprefix(_WARNING) for line in log.getvalue().splitlines() if line.startswith(_WARNING)]
    metrics = dict(outcome.metrics) if outcome.code is ExitCode.Succeeded else None
    return key, {
        "metrics": metrics,
        "steps": outcome.step,
        "message": outcome.message,
        "warnings": warnings,
        "noise": None if noise is None else {"value": noise.whole.text, "error": round(noise.whole.error, 1)},
        "cpuSeconds": round(time.process_time() - began, 2),
    }


def trained(document: Mapping[str, Any], directory: Path, log: TextIO) -> Outcome:
    """Trains in this process, alone, as a worker does; what it prints goes to `log`."""
    alone = WorkerEnvironment(directory / "run.json", host_index=0, num_hosts=1, master_addr="", master_port=0)
    with redirect_stdout(log), redirect_stderr(log):
        return run_replica(parse_run_spec(document), alone, SharedStop(directory / "stop"), _hung)


def _hung(outcome: Outcome) -> NoReturn:
    print(outcome.message, flush=True)
    os._exit(1)
