"""Makes the lines of the table: each probe is tried by itself, and lines that are alike on all hosts become one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import (
    ENV_NODE_NAME,
    FAST_SECONDS,
    SLICE_CHECK_MARKER,
    LineVerdict,
    SliceCheckLine,
    SliceSection,
    SliceTable,
    to_json,
)
from tpu_trainer.contract.errors import PeerLostError, SliceUnfitError

TIME_IS_OVER = f"{FAST_SECONDS:.0f} s were over"


@dataclass(frozen=True)
class CheckedHost:
    """A host of the gang. index: over all slices. pod: the worker's name. node: "" if unknown. name: what the others
    call it."""

    index: int
    pod: str
    node: str = ""
    name: str = ""

    @staticmethod
    def of(environ: Mapping[str, str], spec: RunSpec, index: int) -> CheckedHost:
        """Returns host `index`, on which this process runs. In its slice TPU_WORKER_HOSTNAMES has its name; otherwise
        it is that of host 0 with another number (naming.hostname)."""
        leader, per_slice = environ.get("MASTER_ADDR", ""), spec.slice.hosts // spec.slice.slices
        names, first = environ.get("TPU_WORKER_HOSTNAMES", "").split(","), f"{spec.job.attempt}-0."
        name = leader.replace(first, f"{spec.job.attempt}-{index}.", 1) if leader.startswith(first) else leader
        if len(names) == per_slice > 1:
            name = names[index % per_slice]
        return CheckedHost(index, pod_of(spec, index), environ.get(ENV_NODE_NAME, ""), name)

    def lines(self, lines: Iterable[SliceCheckLine]) -> list[SliceCheckLine]:
        """Returns the lines as this host's."""
        return [replace(line, host=self.pod, node=self.node) for line in lines]


def pod_of(spec: RunSpec, index: int) -> str:
    """Returns the name that the operator gives the pod of host `index`."""
    per_slice = spec.slice.hosts // spec.slice.slices
    return f"{spec.job.name}-{spec.job.attempt}-{index // per_slice}-{index % per_slice}"


def judge(
    section: SliceSection,
    name: str,
    good: bool | None,
    measured: str = "",
    expected: str = "",
    advice: str = "",
    number: float | None = None,
    unit: str = "",
) -> SliceCheckLine:
    """Returns a line. good: None for what has no verdict. A good line needs no advice."""
    verdict = LineVerdict.NOT_TRIED if good is None else LineVerdict.OK if good else LineVerdict.FAILED
    return SliceCheckLine(section, name, verdict, measured, expected, number, unit, advice="" if good else advice)


def attempt(section: SliceSection, name: str, probe: Callable[[], Iterable[SliceCheckLine]]) -> list[SliceCheckLine]:
    """Returns the probe's lines; a probe that raises ends with a failed line and the reason, and the others go on.

    Raises:
        PeerLostError: it may be another host's fault, which says itself what is wrong.
    """
    lines: list[SliceCheckLine] = []
    try:
        lines.extend(probe())
    except PeerLostError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        lines.append(judge(section, name, False, reason, advice="look at the worker's log"))
    return lines


def merge(lines: Iterable[SliceCheckLine]) -> list[SliceCheckLine]:
    """Returns the lines in the order of the sections. Lines of several hosts that differ in nothing but what was
    measured become one, unless they failed; its number is the worst: the lowest of speeds, the highest of all else."""
    groups: dict[tuple[object, ...], list[SliceCheckLine]] = {}
    for line in sorted(lines, key=lambda line: list(SliceSection).index(line.section)):
        own = line.host if line.verdict is LineVerdict.FAILED else ""
        groups.setdefault((line.section, line.name, line.verdict, line.expected, own), []).append(line)
    return [group[0] if len(group) == 1 else _as_one(group) for group in groups.values()]


def _as_one(group: Sequence[SliceCheckLine]) -> SliceCheckLine:
    numbers = [line for line in group if line.number is not None]
    pick = min if group[0].unit.endswith("/s") else max
    worst = pick(numbers, key=lambda line: line.number or 0.0) if numbers else group[0]
    texts = list(dict.fromkeys(line.measured for line in group))
    measured = texts[0] if len(texts) == 1 else f"at worst {worst.measured}" if numbers else "; ".join(texts)
    return replace(worst, measured=measured, host="", node="")


def end_if_failed(lines: Iterable[SliceCheckLine], pod: str) -> None:
    """Ends the host of a failed line with that line, and the other hosts as its peers.

    Raises:
        SliceUnfitError: the line is that of host `pod`, or no single host's.
        PeerLostError: it is another host's.
    """
    failed = [line for line in lines if line.verdict is LineVerdict.FAILED]
    for line in failed:
        if line.host in ("", pod):
            raise SliceUnfitError(line)
    if failed:
        raise PeerLostError(f"slice check: {failed[0]}")


@contextmanager
def timed(seconds: MutableMapping[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of the block, which is a phase."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = time.monotonic() - began


def print_table(lines: Iterable[SliceCheckLine], seconds: Mapping[str, float]) -> None:
    """Prints the table as the line of the log in which the operator finds it."""
    print(f"{SLICE_CHECK_MARKER}{to_json(SliceTable(tuple(merge(lines)), seconds))}", flush=True)
