"""Runs the jobs of many cases, those of one way in the same processes, and reads what they leave."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from tests.cluster.ports import free_port
from tests.trainer import fork_server
from tests.trainer.crossings.expected import Ended
from tests.trainer.crossings.features import Case
from tests.trainer.crossings.legs import Leg, legs
from tests.trainer.gang_processes import ON_INDUCTOR, ON_XLAS_CPU, ROOT, Host, Launcher, chips
from tests.trainer.recorded import recorded

PACKAGES = {"torch": fork_server.TORCH, "compile": fork_server.COMPILER}


@dataclass(frozen=True)
class Run:
    """One leg of a case's job, and its folder."""

    leg: Leg
    folder: Path

    @property
    def outcomes(self) -> dict[int, dict[str, object]]:
        """How the replicas' processes have ended, by place; without those that left no word."""
        files = self.folder.glob("outcome-*.json")
        return {int(file.stem.partition("-")[2]): json.loads(file.read_bytes()) for file in files}

    @property
    def well(self) -> bool:
        outcomes = self.outcomes
        alone = self.leg.case.way in ("spmd",)
        return len(outcomes) == (1 if alone else self.leg.replicas) and all(
            outcome["code"] == "Succeeded" for outcome in outcomes.values()
        )

    def ended(self) -> Ended:
        """Returns what it has left, once it has ended well."""
        found = recorded(self.folder)
        return Ended(
            losses=found.by_step,
            rates={int(step): rates for step, rates in self.outcomes[0]["rates"].items()},
            evaluations={made["step"]: made["miss"] for made in found.evaluations},
            weights=self._tensors("model"),
            average=self._tensors("ema"),
            state=self._tensors("optimizer"),
        )

    def _tensors(self, name: str) -> dict:
        file = self.folder / "last" / f"{name}.safetensors"
        return load_file(file) if file.exists() else {}


@dataclass(frozen=True)
class Job:
    """A case's runs. `output`: what the processes of its way have said."""

    runs: list[Run]
    output: str

    @property
    def trouble(self) -> str:
        """How its first run that did not end well ended; "" if there is none."""
        for number, run in enumerate(self.runs):
            if not run.well:
                said = "; ".join(f"{place}: {o['code']}: {o['message']}" for place, o in sorted(run.outcomes.items()))
                return f"run {number}: {said or 'no word'}\n{self.output[-3000:] if not said else ''}"
        return ""


def run_all(cases: Iterable[Case], directory: Path) -> dict[Case, Job]:
    """Makes the runs of cases of one way."""
    jobs = {case: list(_prepared(case, directory / case.name)) for case in cases}
    left = [run for runs in jobs.values() for run in runs]
    output: dict[Case, str] = {}
    while left:
        said = _together(left, directory)
        failed = next((run for run in left if not run.well), None)
        done = left if failed is None else left[: left.index(failed) + 1]
        output |= dict.fromkeys((run.leg.case for run in done), said)
        # The rest of a job cannot go on from a run that failed.
        left = [run for run in left[len(done) :] if run.leg.case != failed.leg.case] if failed else []
    return {case: Job(runs, output[case]) for case, runs in jobs.items()}


def _prepared(case: Case, directory: Path) -> Iterator[Run]:
    for number, leg in enumerate(legs(case)):
        folder = directory / str(number)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(leg.spec(directory / "checkpoints")))
        (folder / "saved").write_text(str(leg.saved))
        (folder / "port").write_text(str(free_port()))
        yield Run(leg, folder)


def _together(runs: list[Run], directory: Path) -> str:
    """Makes the runs one after the other, until one fails; returns what the processes said."""
    way = runs[0].leg.case.way
    processes = 1 if way in ("spmd", "chips") else max(run.leg.replicas for run in runs)
    with _processes(way, processes, runs, directory) as hosts:
        if hosts[0].wait() == 0:
            codes = [host.wait() for host in hosts]
            assert codes == [0] * len(hosts), "\n".join(host.output for host in hosts)
        else:
            failed = next(run for run in runs if not run.well)
            # The others may wait for a later run, which does not come.
            for host in hosts[1 : failed.leg.replicas]:
                host.wait()
    return "\n".join(host.output for host in hosts)


@contextmanager
def _processes(way: str, count: int, runs: list[Run], directory: Path) -> Iterator[list[Host]]:
    xla = way not in PACKAGES
    env = {
        **Launcher(directory).base(),
        **(ON_XLAS_CPU if xla else {}),
        **(ON_INDUCTOR if way == "compile" else {}),
        **(chips(2) if way == "chips" else {}),
        fork_server.FORKS_REPLICAS: "1",
        "TEST_CROSSINGS": json.dumps([str(run.folder) for run in runs]),
        "TEST_CROSSINGS_WAY": way,
    }
    hosts: list[Host] = []
    try:
        for index in range(count):
            process = fork_server.start(
                PACKAGES.get(way, fork_server.XLA),
                "tests.trainer.crossings.host",
                {**env, "TPUJOB_HOST_INDEX": str(index)},
                str(ROOT),
            )
            hosts.append(Host(process, directory / f"termination-{index}"))
        yield hosts
    finally:
        for host in hosts:
            host.reap()
