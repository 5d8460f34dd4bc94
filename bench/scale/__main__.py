"""What the operator costs at every size (docs/scale.md).

    python -m bench.scale [--quick] [--rounds N] [--json FILE] [--docs docs/scale.md]

Uses a real control plane and simulated nodes. Contenders alternate: a bare client, the operator as the chart ships it,
and a plain Indexed Job. Prints tables; --json writes every single number, --docs the tables and the drawing.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.scale import tables
from bench.scale.chart import drawing
from bench.scale.contenders import CONTENDERS
from bench.scale.lasting import churn, finished_jobs, memory_after_start, memory_now, start_beside
from bench.scale.stage import INDEXED, OPERATOR, Object, Stage, a_stage
from bench.trainer.tables import filled_in
from tests.cluster.binaries import BINARIES
from tpu_training_operator.report.formatting import plural


@dataclass(frozen=True)
class Plan:
    """`rounds`: how many, by jobs and hosts of each; the last are the most pods. In the last round of that and of
    `gang`, an operator is started beside what runs. `pods`: how many the nodes hold."""

    rounds: Mapping[tuple[int, int], int]
    gang: tuple[int, int]
    finished: int
    churn_seconds: float
    pods: int

    @property
    def crowd(self) -> tuple[int, int]:
        return list(self.rounds)[-1]


FULL = Plan(
    {(1, 4): 5, (1, 64): 5, (1, 256): 3, (1, 1024): 2, (1, 2304): 1, (200, 4): 2, (1000, 8): 1},
    gang=(1, 1024),
    finished=1500,
    churn_seconds=90,
    pods=9000,
)
QUICK = Plan({(1, 4): 2, (1, 64): 2, (20, 4): 1}, gang=(1, 64), finished=50, churn_seconds=15, pods=500)
Look = Callable[[int, int], Awaitable[None]]

# 8000 pods take a minute, and a plain Job has nothing to add there.
_WITHOUT_INDEXED = 1000


async def one_round(stage: Stage, number: int, jobs: int, hosts: int, beside: Look | None) -> Object:
    """All contenders, in turns forwards and backwards, so that none is always first. `beside`: what to look at while
    the operator's jobs run."""
    names = [name for name in CONTENDERS if name != INDEXED or jobs < _WITHOUT_INDEXED]
    found: Object = {"jobs": jobs, "hosts": hosts}
    for name in names if number % 2 == 0 else reversed(names):
        run = await CONTENDERS[name](stage, jobs, hosts, restart=jobs == 1)
        again = "" if run.restart is None else f", restart {run.restart:.2f} s"
        print(f"{jobs} x {hosts}: {name} {run.create:.2f} s{again}", file=sys.stderr, flush=True)
        found[name] = asdict(run)
        if name == OPERATOR and beside:
            await beside(jobs, hosts)
        await stage.clear(name)
    return found


async def measure(plan: Plan, rounds: int | None) -> Object:
    async with a_stage(plan.pods) as stage:
        at = {"nothing": await memory_now(stage)}
        found: list[Object] = []
        start: Object = {}

        async def look(jobs: int, hosts: int) -> None:
            start.update(await start_beside(stage, jobs, hosts))
            at[f"{jobs * hosts} pods of {plural(jobs, 'job')}"] = await memory_now(stage)

        for size, planned in plan.rounds.items():
            count = rounds or planned
            for number in range(count):
                is_last = number + 1 == count and size in (plan.gang, plan.crowd)
                found.append(await one_round(stage, number, *size, look if is_last else None))
        await finished_jobs(stage, plan.finished)
        at[f"{plan.finished} finished jobs"] = await memory_now(stage)
        await stage.clear(OPERATOR)
        await memory_after_start(stage)
        return {"rounds": found, "memory": {"at": at, "churn": await churn(stage, plan.churn_seconds)}, "start": start}


def machine() -> Object:
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "kubernetes": BINARIES["kube-apiserver"].version,
    }


def tables_of(results: Object) -> dict[str, str]:
    """By the name of their place in the docs."""
    return {
        "machine": tables.machine_line(results["machine"]),
        "times": tables.times_table(results["rounds"]),
        "requests": tables.requests_table(results["rounds"]),
        "waits": tables.waits_table(results["rounds"]),
        "memory": tables.memory_table(results["memory"]),
        "start": tables.start_table(results["start"]),
    }


def write_docs(page: Path, results: Object) -> None:
    document = page.read_text(encoding="utf-8")
    for name, text in tables_of(results).items():
        document = filled_in(document, name, text)
    page.write_text(document, encoding="utf-8")
    page.with_suffix(".svg").write_text(drawing(results["rounds"]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small gangs only, in three minutes")
    parser.add_argument("--rounds", type=int, help="instead of each size's own number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single number")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the tables into this page, and its drawing")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="do not measure: show this JSON")
    options = parser.parse_args()
    results: dict[str, Any]
    if options.earlier:
        results = json.loads(options.earlier.read_text())
    else:
        results = {"machine": machine()}
        results |= asyncio.run(measure(QUICK if options.quick else FULL, options.rounds))
    for text in tables_of(results).values():
        print(f"\n{text}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.docs:
        write_docs(options.docs, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
