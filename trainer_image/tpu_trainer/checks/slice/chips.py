"""Whether the chips compute rightly and as fast as they should, and whether their sums are exact.

All replicas measure at the same time and see all numbers, so all come to the same verdict. The limits are wide, since
no chip has been measured yet: they find one that is throttled, shared or broken, not one that is ten percent slow. With
backend xla-spmd one program runs on all hosts, so none of them is seen to be slow by itself.

On hardware CPU, other processes may take a host's cores at any time. So the CPU time of its product counts there. One
that takes long by the clock alone is held back by the limit of its cgroup, or nobody can tell.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpu_contract.slice_check import ExpectedChips, SliceCheckLine, SliceSection
from tpu_trainer.checks.slice.lines import TIME_IS_OVER, CheckedHost, judge
from tpu_trainer.checks.slice.sums import SLICE, KnownSums
from tpu_trainer.doctor.stragglers import SLOW_FACTOR
from tpu_trainer.gang.backends import Backend

if TYPE_CHECKING:
    from tpu_trainer.checks.slice.command import SliceProbe

_CHIPS = SliceSection.CHIPS
_REPAIR = "leave this node out, and have it repaired"

LEAST_SHARE, LEAST_LINK_SHARE = 0.4, 0.1
"""The least part of their peaks that products and memory must reach, and the largest sum over a slice."""

SLOW_FACTOR_ON_CPU, HELD_SHARE = 3.0, 0.5
"""How many times as long a host on hardware CPU may take, and the part of its time for which its cgroup's limit holds
one back that is slow for that reason."""

_TRIES, _ROUNDS = 4, 2
"""Any host is slow once. The best of so many measurements counts, as soon as no host is slow by them."""

SIZES, FAST_SIZE = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28), 1 << 20
"""Bytes of the sums. The largest proves nothing more on hardware CPU."""

_PRODUCT, _PRODUCT_CPU, _MEMORY = range(3)
_REWRITES, _LONG = 8, 1e6


@dataclass(frozen=True)
class Effort:
    """How much is measured. side: of the square matrices, of which `products` are multiplied. megabytes: of memory.
    seconds: the least that each of the rounds lasts, so that a host that is slowed in turns shows. copies: devices of
    this process, each of which has its own. slow_factor: how many times as long a slow host takes."""

    side: int
    products: int
    megabytes: int
    seconds: float
    copies: int = 1
    slow_factor: float = SLOW_FACTOR
    on_cpu: bool = False


@dataclass(frozen=True)
class Speed:
    """What the slowest replica of a host needed in its best measurement, in seconds: for the product, for the product
    in CPU time, and for the memory. held: the part of the last measurement for which its cgroup's limit held it back.
    wrong: elements of a product that are."""

    needed: tuple[float, ...]
    held: float = 0.0
    wrong: float = 0.0


def check_chips(check: SliceProbe, until: float) -> Iterator[SliceCheckLine]:
    """Yields the lines of all hosts, the same in every replica. A collective. until: the moment after which no
    measurement begins."""
    spec, hosts, backend = check.spec, check.hosts, check.context.backend
    copies = spec.slice.replicas // spec.slice.hosts if spec.backend == "xla-spmd" else 1
    # On a chip 40 ms or more, far longer than it takes to send a program.
    effort = Effort(4096, 64, 512, 0.1, copies)
    if spec.hardware == "CPU":
        effort = Effort(192, 4, 2, 0.2, copies, SLOW_FACTOR_ON_CPU, on_cpu=True)
    speeds, rows = dict[int, Speed](), list[list[float]]()
    for number in range(_TRIES):
        began, held = time.monotonic(), _held_seconds()
        with _one_thread():
            wrong, *needed = _measure_product(backend, effort, until)
            needed.append(_measure_memory(backend, effort, until))
        ended, held = time.monotonic(), _held_seconds() - held
        # Only the gang's store tells who does not come.
        check.come(f"the end of measurement {number + 1}")
        rows = backend.gather([check.me.index, min(until - ended, _LONG), held / (ended - began), wrong, *needed])
        speeds = _best(speeds, rows)
        in_time = min(row[1] for row in rows) > 0
        if not in_time or not any(find_slow_hosts(speeds, effort)):
            break
    ranks = [int(row[0]) for row in rows]
    for index, count in Counter(ranks).items():
        wanted = len(ranks) // len(hosts)
        count_line = judge(_CHIPS, "processes per host", count == wanted, str(count), str(wanted), number=float(count))
        yield from hosts[index].lines([count_line])
    yield from judge_speeds(check.chips, speeds, hosts, effort)
    if spec.slice.replicas == 1 or not in_time:
        yield judge(_CHIPS, "sums", None, advice=TIME_IS_OVER if spec.slice.replicas > 1 else "there is one replica")
        return
    sums = KnownSums(backend, spec, ranks)
    for size in SIZES[: -1 if effort.on_cpu else None] if check.is_full else (FAST_SIZE,):
        for level in sums.levels[0 if check.is_full else -1 :]:
            check.come(f"the sum of {size} bytes over {level}")
            yield from _check_sum(sums, level, size, check.chips, hosts)


def _best(before: Mapping[int, Speed], rows: Sequence[Sequence[float]]) -> dict[int, Speed]:
    """Returns each host's slowest replica, in the best measurement so far."""
    best: dict[int, Speed] = {}
    for index in dict.fromkeys(int(row[0]) for row in rows):
        held, wrong, *needed = map(max, zip(*(row[2:] for row in rows if row[0] == index), strict=True))
        old = before.get(index, Speed(tuple(needed)))
        best[index] = Speed(tuple(map(min, old.needed, needed)), held, max(wrong, old.wrong))
    return best


def find_slow_hosts(speeds: Mapping[int, Speed], effort: Effort) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the slow hosts, with how many times as long as the others they take; and those of which nobody can tell,
    since they take long by the clock alone, and no limit holds them back."""
    if not effort.on_cpu:
        return _find_slow(speeds, (_PRODUCT, _MEMORY), effort), {}
    by_clock = _find_slow(speeds, (_PRODUCT,), effort)
    slow = _find_slow(speeds, (_PRODUCT_CPU,), effort)
    slow |= {index: times for index, times in by_clock.items() if speeds[index].held > HELD_SHARE}
    return slow, {index: times for index, times in by_clock.items() if index not in slow}


def _find_slow(speeds: Mapping[int, Speed], columns: Sequence[int], effort: Effort) -> dict[int, float]:
    """Finds hosts that are slow: each needs more than `slow_factor` times as long as the median of the other hosts. The
    median, so that several slow hosts do not excuse each other; of two hosts, the other one is the median."""
    slow: dict[int, float] = {}
    for index, own in speeds.items():
        if others := [speed.needed for other, speed in speeds.items() if other != index]:
            slower = max(own.needed[column] / median_low(needed[column] for needed in others) for column in columns)
            slow |= {index: slower} if slower > effort.slow_factor else {}
    return slow


def judge_speeds(
    chips: ExpectedChips, speeds: Mapping[int, Speed], hosts: Sequence[CheckedHost], effort: Effort
) -> Iterator[SliceCheckLine]:
    """Judges each host against the peaks, where they are known, and against the other hosts."""
    per_device = 1 / max(chips.devices_per_chip, 1)
    tflop = 2 * effort.side**3 * effort.products / 1e12
    gigabytes = 2 * _REWRITES * effort.megabytes * (1 << 20) / 1e9
    slow, untold = find_slow_hosts(speeds, effort)
    for index, speed in sorted(speeds.items()):
        product, _, memory = speed.needed
        lines = [
            judge(_CHIPS, "exact products", not speed.wrong, f"{speed.wrong:.0f} wrong elements", "0", _REPAIR),
            _judge_share("bfloat16 product", tflop / product, "TFLOP/s", chips.bf16_tflops * per_device),
            _judge_share("memory", gigabytes / memory, "GB/s", chips.hbm_gb_per_second * per_device),
        ]
        if len(hosts) > 1:
            slower = (slow | untold).get(index)
            measured = f"takes {slower:.1f} times as long as the others" if slower else "as fast as the others"
            if index in slow and speed.held > HELD_SHARE:
                measured += f", held back by its cgroup's limit for {speed.held:.0%} of the time"
            good = None if index in untold else not slower
            advice = _REPAIR if index in slow else "cannot tell: other processes had its CPUs"
            expected = f"at most {effort.slow_factor:g} times as long"
            lines.append(judge(_CHIPS, "slow host", good, measured, expected, advice))
        yield from hosts[index].lines(lines)


def _judge_share(name: str, value: float, unit: str, peak: float, least: float = LEAST_SHARE) -> SliceCheckLine:
    if not peak:
        return judge(_CHIPS, name, True, f"{value:.3g} {unit}", number=value, unit=unit)
    measured, expected = f"{value:.3g} {unit}, {value / peak:.0%} of the peak", f"{least:.0%} of {peak:.4g} {unit}"
    advice = f"throttled, shared or broken: {_REPAIR}"
    return judge(_CHIPS, name, value >= least * peak, measured, f"at least {expected}", advice, value, unit)


def _measure_product(backend: Backend, effort: Effort, until: float) -> tuple[float, float, float]:
    """Multiplies small integers by a permutation, which bfloat16 does exactly. Returns how many elements are wrong, and
    the pace."""
    side, count, wrong = effort.side, effort.products, 0.0
    values = (torch.arange(side * side).reshape(side, side) % 251 - 125).to(torch.bfloat16)
    turn = torch.eye(side, dtype=torch.bfloat16).roll(1, dims=1)[None]
    # In one program over several devices, rows are divided among them, and a single row goes to all.
    rows = [tensor.repeat(effort.copies, 1) for tensor in (values, values.roll(count, dims=1))]
    left, expected, right = backend.to_device([*rows, turn])

    def multiply() -> None:
        nonlocal wrong
        result: Tensor = left
        for _ in range(count):
            result = result @ right[0]
        wrong = max(wrong, float(backend.to_host([(result != expected).to(torch.float32).sum()])[0]))

    pace = _pace(multiply, effort, until)
    return wrong, *pace


def _measure_memory(backend: Backend, effort: Effort, until: float) -> float:
    """Reads and writes a tensor several times, each time in a program of its own, so that none is left out."""
    tensor: Tensor = backend.to_device(torch.zeros(effort.copies * effort.megabytes << 18))

    def rewrite() -> None:
        current = tensor
        for _ in range(_REWRITES):
            current = current + 1.0
            backend.sync()
        backend.to_host([current[:1].clone()])

    seconds, _ = _pace(rewrite, effort, until)
    return seconds


def _pace(work: Callable[[], object], effort: Effort, until: float) -> tuple[float, float]:
    """Returns the seconds of the work in the best of the rounds by the clock, and of this process's CPU time, after a
    first time that may compile."""
    work()
    clock, cpu = [], []
    for _ in range(_ROUNDS):
        began, cpu_began, count, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
        while elapsed < effort.seconds:
            work()
            count, elapsed = count + 1, time.perf_counter() - began
        clock.append(elapsed / count)
        cpu.append((time.process_time() - cpu_began) / count)
        if time.monotonic() > until:
            break
    return min(clock), min(cpu)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch compute in one thread: several wait for each other, which takes CPU time where others have the cores.
    That of one thread differs by a few percent, however busy the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _held_seconds() -> float:
    """Returns for how long the CPU limit of this process's cgroup has held it back until now; 0.0 if nobody counts."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # A container may see its own cgroup as the root, whatever it is called.
            for place in (f"{controllers}/{path}", controllers):
                file = Path(f"/sys/fs/cgroup/{place}/cpu.stat")
                if file.exists() and (found := re.search(r"throttled_(usec|time) (\d+)", file.read_text())):
                    return int(found[2]) / (1e6 if found[1] == "usec" else 1e9)
    return 0.0


def _check_sum(
    sums: KnownSums, level: str, size: int, chips: ExpectedChips, hosts: Sequence[CheckedHost]
) -> Iterator[SliceCheckLine]:
    results = sums.measure(level, size)
    amount = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
    name, wrong = f"sum over {level}, {amount}", [result.wrong for result in results]
    if any(wrong):
        measured = f"wrong on {sum(wrong)} of {len(wrong)} processes"
        line = judge(_CHIPS, name, False, measured, "exact", f"a chip or a link computes wrongly: {_REPAIR}")
        places = {sums.hosts[rank] for rank in find_ranks_at_fault(wrong, [result.odd for result in results])}
        yield from [own for index in sorted(places) for own in hosts[index].lines([line])] or [line]
        return
    speed = sums.bytes_sent(level, size) / 1e9 / max(result.seconds for result in results)
    yield judge(_CHIPS, name, True, f"exact, {speed:.3g} GB/s", "exact", number=speed, unit="GB/s")
    if (level, size) == (SLICE, SIZES[-1]) and chips.ici_gb_per_second:
        peak = chips.ici_gb_per_second / max(chips.devices_per_chip, 1)
        yield _judge_share("links of the slice", speed, "GB/s", peak, LEAST_LINK_SHARE)


def find_ranks_at_fault(wrong: Sequence[bool], odd: Sequence[int]) -> list[int]:
    """Returns the ranks at fault for sums of which at least one is wrong: those with a wrong sum, unless all have one;
    otherwise the rank whose part all of them find wrong. Empty if nothing tells."""
    if not all(wrong):
        return [rank for rank, is_wrong in enumerate(wrong) if is_wrong]
    return sorted({*odd} - {-1}) if len({*odd}) == 1 else []
