"""How long a worker needs from the start of its process to its first step, and what that time goes to.

    python -m bench.start [--rounds 5] [--hosts 1] [--before DIRECTORY] [--imports]

Every run is `python -m tpu_trainer` as a worker runs it, on XLA's CPU device: examples/digits.py and the benchmarks'
small transformer, from the beginning and from a checkpoint. `--before` names another checkout, whose trainer runs in
turn with this one's. Processor seconds say more than seconds on a machine that does other things, too; both end with
the line that the trainer prints when it has read the loss of its first step. The phases are the trainer's own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.trainer.ours import environments, run_spec

ROOT = Path(__file__).parents[1]
MODELS = {
    "digits": {"entrypoint": "examples.digits:task", "batch": {"global": 32, "perReplica": 32}},
    "transformer": {},
}
_FIRST_LOSS, _PHASES = "first loss after", re.compile(r"first step made after [\d.]+ s: (.*)")


@dataclass(frozen=True)
class Run:
    """Until the first loss was read: seconds, and seconds of a processor. `phases`: as the trainer tells them."""

    seconds: float
    processor: float
    phases: dict[str, float]


def start(tree: Path, spec: dict[str, Any]) -> Run:
    """Runs the trainer of a checkout to its end. Raises RuntimeError, with its last lines, if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        hosts = environments(spec, Path(directory))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPUJOB_", "PJRT_", "XLA_"))}
        paths = os.pathsep.join(str(tree / part) for part in ("trainer_image", "contract", "."))
        common = {**kept, "PYTHONPATH": paths, "PJRT_DEVICE": "CPU"}
        command = [sys.executable, "-m", "tpu_trainer"]
        others = [
            subprocess.Popen(command, cwd=tree, env={**common, **host}, stdout=-3, stderr=-3)  # noqa: S603
            for host in hosts[1:]
        ]
        begun, found, lines = time.monotonic(), None, list[str]()
        first = subprocess.Popen(  # noqa: S603
            command, cwd=tree, env={**common, **hosts[0]}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert first.stdout is not None
        for line in first.stdout:
            lines.append(line)
            if line.startswith(_FIRST_LOSS):
                found = time.monotonic() - begun, _processor_seconds(first.pid)
        codes = [first.wait(), *(other.wait() for other in others)]
    if found is None or any(codes):
        raise RuntimeError(f"{codes}: {''.join(lines[-20:])}")
    told = next((match[1] for line in lines if (match := _PHASES.match(line))), "")
    return Run(
        *found, {name: float(value) for name, _, value in (part.partition(" ") for part in told.split(", ") if part)}
    )


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(trees: dict[str, Path], name: str, hosts: int, rounds: int, *, resumed: bool) -> dict[str, list[Run]]:
    """Returns the runs by the name of their tree; they take turns."""
    runs: dict[str, list[Run]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as directory:
        saved, copy = Path(directory, "saved"), Path(directory, "copy")
        made = {**run_spec("transformer", 1, hosts), **MODELS[name]}
        if hosts > 1:
            made["batch"] = {"global": made["batch"]["global"], "perReplica": made["batch"]["global"] // hosts}
        if resumed:
            start(ROOT, {**made, "checkpoint": {"uri": str(saved), "everySteps": 1, "keep": 1}})
            made = {**made, "trainSteps": 2, "checkpoint": {"uri": str(copy), "everySteps": 100, "keep": 1}}
        for number in range(rounds + 1):
            for tree, path in trees.items():
                if resumed:
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(saved, copy)
                run = start(path, made)
                # The first round reads the files from the disk.
                if number:
                    runs[tree].append(run)
    return runs


IMPORTS = {
    "torch": "import torch",
    "torch and torch_xla": "import torch, torch_xla",
    "the same, as a worker does": "import tpu_trainer.gang.backends.torch_xla_import as own; own.import_torch_xla()",
}


def imports_table(rounds: int) -> None:
    """Prints the processor seconds of the largest imports."""
    print("| import | processor seconds |\n|---|---|")
    for name, code in IMPORTS.items():
        script = f"{code}\nimport time\nprint(time.process_time())"
        command, environment = [sys.executable, "-c", script], {**os.environ, "PJRT_DEVICE": "CPU"}
        used = [
            float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)  # noqa: S603
            for _ in range(rounds)
        ]
        print(f"| {name} | {spread(used)} |", flush=True)


def spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--before", type=Path, help="another checkout, to be compared with")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--imports", action="store_true", help="only the processor seconds of the largest imports")
    options = parser.parse_args()
    if options.imports:
        imports_table(options.rounds)
        return
    trees = {**({"before": options.before.resolve()} if options.before else {}), "now": ROOT}
    print("| model | begins with | trainer | processor seconds | seconds | processor, of before | phases, in seconds |")
    print("|---|---|---|---|---|---|---|")
    for model in options.models:
        for resumed in (False, True):
            runs = measure(trees, model, options.hosts, options.rounds, resumed=resumed)
            for tree, measured in runs.items():
                used = [run.processor for run in measured]
                before = [run.processor for run in runs["before"]] if tree == "now" and options.before else []
                share = f"{median([a / b for a, b in zip(used, before, strict=True)]):.0%}" if before else ""
                phases = ", ".join(
                    f"{phase} {median([run.phases[phase] for run in measured]):.1f}" for phase in measured[0].phases
                )
                begins = "a checkpoint" if resumed else "nothing"
                times = f"{spread(used)} | {spread([run.seconds for run in measured])}"
                print(f"| {model} | {begins} | {tree} | {times} | {share} | {phases} |", flush=True)


if __name__ == "__main__":
    main()
