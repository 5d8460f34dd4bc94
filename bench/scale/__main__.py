"""What the operator costs at every size (docs/scale.md).

    python -m bench.scale [--quick] [--only 200x4 memory] [--rounds N] [--json FILE] [--docs docs/scale.md]

Uses a real control plane and simulated nodes. Contenders alternate: a bare client, the operator as the chart ships it,
a plain Indexed Job, and JobSet where it can be had. Prints tables; --json writes every single number at once, --docs
the page's drawing and measured.md.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.scale import tables
from bench.scale.chart import drawing
from bench.scale.contenders import CONTENDERS
from bench.scale.jobset import VERSION
from bench.scale.lasting import churn, finished_jobs, memory_after_start, memory_now, start_beside
from bench.scale.stage import INDEXED, JOBSET, OPERATOR, Object, Stage, a_stage
from bench.trainer.tables import filled_in
from tests.cluster.binaries import BINARIES
from tpu_training_operator.html_report.formatting import plural


@dataclass(frozen=True)
class Plan:
    """`rounds`: how many, by jobs and hosts of each; the last are the most pods. In the last round of that and of
    `gang`, an operator is started beside what runs. `finished`: how many finished jobs; 0: memory is not measured.
    `pods`: how many the nodes hold."""

    rounds: Mapping[tuple[int, int], int]
    gang: tuple[int, int]
    finished: int
    churn_seconds: float
    pods: int

    @property
    def crowd(self) -> tuple[int, int] | None:
        return list(self.rounds)[-1] if self.rounds else None


FULL = Plan(
    {(1, 4): 5, (1, 64): 5, (1, 256): 3, (1, 1024): 2, (1, 2304): 1, (200, 4): 2, (1000, 8): 1},
    gang=(1, 1024),
    finished=1500,
    churn_seconds=90,
    pods=9000,
)
QUICK = Plan({(1, 4): 2, (1, 64): 2, (20, 4): 1}, gang=(1, 64), finished=50, churn_seconds=15, pods=500)
Look = Callable[[int, int], Awaitable[None]]

# 8000 pods take a minute, and other controllers have nothing to add there.
_FEWEST_WITHOUT_OTHERS = 1000
MEMORY = "memory"
EVERY_NUMBER = Path(__file__).with_name("measured.md")


async def one_round(stage: Stage, number: int, jobs: int, hosts: int, beside: Look | None) -> Object:
    """Runs all contenders, in turns forwards and backwards, so that none is always first. `beside`: what to look at
    while the operator's jobs run."""
    out = {INDEXED, JOBSET} if jobs >= _FEWEST_WITHOUT_OTHERS else {JOBSET} if stage.job_sets is None else set()
    names = [name for name in CONTENDERS if name not in out]
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


async def measure(plan: Plan, rounds: int | None, results: Object, save: Callable[[], None]) -> None:
    """Fills `results`. `save`: whenever something has been added."""
    async with a_stage(plan.pods) as stage:
        at = {"nothing": await memory_now(stage)}
        results |= {"rounds": [], "memory": {"at": at}, "start": {}}
        if stage.job_sets is not None:
            results["machine"]["jobset"] = VERSION

        async def look(jobs: int, hosts: int) -> None:
            results["start"] = await start_beside(stage, jobs, hosts)
            at[f"{jobs * hosts} pods of {plural(jobs, 'job')}"] = await memory_now(stage)

        for size, planned in plan.rounds.items():
            count = rounds or planned
            for number in range(count):
                is_last = number + 1 == count and size in (plan.gang, plan.crowd)
                results["rounds"].append(await one_round(stage, number, *size, look if is_last else None))
                save()
        if not plan.finished:
            return
        await finished_jobs(stage, plan.finished)
        at[f"{plan.finished} finished jobs"] = await memory_now(stage)
        save()
        await stage.clear(OPERATOR)
        await memory_after_start(stage)
        results["memory"]["churn"] = await churn(stage, plan.churn_seconds)
        save()


def only(plan: Plan, names: Sequence[str]) -> Plan:
    """Keeps only the rows with these names: JOBSxHOSTS, or "memory" for what follows the rounds. Raises ValueError."""
    rounds = {size: count for size, count in plan.rounds.items() if f"{size[0]}x{size[1]}" in names}
    if unknown := set(names) - {MEMORY} - {f"{jobs}x{hosts}" for jobs, hosts in rounds}:
        known = [f"{jobs}x{hosts}" for jobs, hosts in plan.rounds]
        raise ValueError(f"{', '.join(sorted(unknown))}: not one of {', '.join([*known, MEMORY])}")
    return replace(plan, rounds=rounds, finished=plan.finished if MEMORY in names else 0)


def machine() -> Object:
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "kubernetes": BINARIES["kube-apiserver"].version,
    }


def tables_of(results: Object) -> dict[str, str]:
    """Returns the tables by the name of their place in the docs."""
    return {
        "machine": tables.machine_line(results["machine"]),
        "times": tables.times_table(results["rounds"]),
        "requests": tables.requests_table(results["rounds"]),
        "waits": tables.waits_table(results["rounds"]),
        "memory": tables.memory_table(results["memory"]),
        **({"start": tables.start_table(results["start"])} if results["start"] else {}),
    }


def write_docs(page: Path, results: Object) -> None:
    for place in (page, EVERY_NUMBER):
        document = place.read_text(encoding="utf-8")
        for name, text in tables_of(results).items():
            document = filled_in(document, name, text)
        place.write_text(document, encoding="utf-8")
    page.with_suffix(".svg").write_text(drawing(results["rounds"]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small gangs only, in three minutes")
    parser.add_argument("--rounds", type=int, help="instead of each size's own number")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows: JOBSxHOSTS, or memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single number, after each round")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page's drawing, and measured.md")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="do not measure: show this JSON")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.earlier.read_text()) if options.earlier else {"machine": machine()}

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    if not options.earlier:
        plan = QUICK if options.quick else FULL
        try:
            plan = only(plan, options.only) if options.only else plan
        except ValueError as error:
            parser.error(str(error))
        asyncio.run(measure(plan, options.rounds, results, save))
    save()
    for text in tables_of(results).values():
        print(f"\n{text}")
    if options.docs:
        write_docs(options.docs, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
