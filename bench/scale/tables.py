"""The results as tables, for the terminal and measured.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.scale.stage import BARE, FLOOR, INDEXED, JOBSET, OPERATOR
from bench.trainer.compare import Spread

Rows = list[list[str]]


def machine_line(machine: Mapping[str, Any]) -> str:
    return (
        f"Measured on {machine['cpus']} CPU cores, load {machine['load']:.1f} before the start; Kubernetes"
        f" {machine['kubernetes']}, {'JobSet ' + machine['jobset'] if 'jobset' in machine else 'no JobSet'},"
        f" Python {machine['python']}."
    )


def times_table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of every contender and its ratio to the floor of the same round, and the operator's to bare pods: median
    (min..max)."""
    head = ["what", "rounds", "floor, s", "operator, s", "of the floor", "Indexed Job, s", "of the floor"]
    head += ["JobSet, s", "of the floor"]
    rows = [[*head, "bare pods, s", "operator of bare pods"]]
    for jobs, hosts in dict.fromkeys((each["jobs"], each["hosts"]) for each in rounds):
        same = [each for each in rounds if (each["jobs"], each["hosts"]) == (jobs, hosts)]
        for kind in ("create", "restart"):
            if any(each[FLOOR][kind] is not None for each in same):
                name = f"{kind} {hosts} hosts" if jobs == 1 else f"{jobs} jobs x {hosts} hosts"
                rows.append([name, str(len(same)), *_compared(same, kind)])
    return markdown(rows)


def _compared(rounds: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    cells = [seconds([each[FLOOR][kind] for each in rounds])]
    for name in (OPERATOR, INDEXED, JOBSET):
        both = [(each[name][kind], each[FLOOR][kind]) for each in rounds if name in each and each[name][kind]]
        cells += [seconds([own for own, _ in both]), ratio([own / least for own, least in both])] if both else ["", ""]
    least = [(each[BARE][kind], each[OPERATOR][kind]) for each in rounds if BARE in each]
    cells += [seconds([each for each, _ in least]), ratio([own / each for each, own in least])] if least else ["", ""]
    return cells


def requests_table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Shows what one attempt costs the API server; the largest number of all rounds counts."""
    columns = ["creates", "other_writes", "events", "reads", "endpoint_writes"]
    head = ["what", "pods created", "other writes", "events", "reads", "endpoint writes by anyone", "CPU per host, ms"]
    rows = [head]
    for jobs, hosts in dict.fromkeys((each["jobs"], each["hosts"]) for each in rounds):
        same = [each[OPERATOR] for each in rounds if (each["jobs"], each["hosts"]) == (jobs, hosts)]
        for kind in ("create", "restart"):
            accounts = [each["more"][kind] for each in same if kind in each["more"]]
            if accounts:
                name = f"{kind} {hosts} hosts" if jobs == 1 else f"one of {jobs} jobs x {hosts} hosts"
                most = [max(each["cost"][column] for each in accounts) / jobs for column in columns]
                cpu = Spread.of([each["cpuMsPerHost"] for each in accounts])
                rows.append([name, *map(_count, most), f"{cpu.median:.1f} ({cpu.least:.1f}..{cpu.greatest:.1f})"])
    return markdown(rows)


def waits_table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Shows how long jobs wait for each other."""
    rows = [["what", "job to its first pod, p99", "in the queue, p99 at most"]]
    for jobs, hosts in dict.fromkeys((each["jobs"], each["hosts"]) for each in rounds if each["jobs"] > 1):
        same = [each[OPERATOR]["more"] for each in rounds if (each["jobs"], each["hosts"]) == (jobs, hosts)]
        first, queued = ([each[name] for each in same] for name in ("firstPod", "hintToPass"))
        most = "more than any bound" if None in queued else f"{max(queued):g} s"
        rows.append([f"{jobs} jobs x {hosts} hosts", f"{seconds(first)} s", most])
    return markdown(rows)


def memory_table(memory: Mapping[str, Any]) -> str:
    rows = [["with", "resident, MiB", "peak, MiB"]]
    rows += [[name, f"{each['rss']:.0f}", f"{each['peak']:.0f}"] for name, each in memory["at"].items()]
    if churn := memory.get("churn"):
        rows.append([f"{churn['jobs']} jobs come and gone in {churn['seconds']:.0f} s", *_slope(churn)])
    return markdown(rows)


def _slope(churn: Mapping[str, Any]) -> list[str]:
    return [f"{churn['rss'][-1]:.0f}", f"grows by {churn['kibPerJob']:.1f} KiB a job over the second half"]


def start_table(start: Mapping[str, Any]) -> str:
    row = [str(start[name]) for name in ("jobs", "pods")] + [f"{start['seconds']:.1f}"]
    row += [str(start[name]) for name in ("reads", "writes")]
    return markdown([["jobs in place", "pods", "seconds until all are seen", "reads", "writes"], row])


def seconds(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.2f} ({spread.least:.2f}..{spread.greatest:.2f})"


def ratio(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.2f}x ({spread.least:.2f}..{spread.greatest:.2f})"


def _count(number: float) -> str:
    return f"{number:g}" if number == round(number) else f"{number:.2f}"


def markdown(rows: Rows) -> str:
    """Draws a table, whose header is the first row."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
