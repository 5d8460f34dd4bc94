"""Whether the chips compute rightly and as fast as they should, and whether their sums are exact.

All replicas measure at the same time and see all numbers, so all come to the same verdict. The limits are wide, since
no chip has been measured yet: they find one that is throttled, shared or broken, not one that is ten percent slow. With
backend xla-spmd one program runs on all hosts, so none of them is seen to be slow by itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import CheckMode, ExpectedChips, SliceCheckLine, SliceSection
from tpu_trainer.checks.slice.lines import CheckedHost, judge
from tpu_trainer.checks.slice.sums import SLICE, KnownSums
from tpu_trainer.doctor.stragglers import SLOW_FACTOR
from tpu_trainer.gang.backends import Backend

_CHIPS = SliceSection.CHIPS
_REPAIR = "leave this node out, and have it repaired"

LEAST_SHARE, LEAST_LINK_SHARE = 0.4, 0.1
"""The least part of their peaks that products and memory must reach, and the largest sum over a slice."""

SLOW_FACTOR_ON_CPU = 3.0
"""Hosts on hardware CPU are shared: another process may take half of their cores at any time."""

_TRIES = 8
"""Any host is slow once. The best of so many measurements counts, as soon as no host is slow by them."""

SIZES, LARGEST_ON_CPU, FAST_SIZE = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28), 1 << 24, 1 << 20
"""Bytes of the sums; and the most on hardware CPU, where larger ones prove nothing more."""

_REWRITES = 8


@dataclass(frozen=True)
class Effort:
    """How much is measured. side: of the square matrices, of which `products` are multiplied. megabytes: of memory.
    seconds: the least that each of the rounds lasts, so that a host that is slowed in turns shows. copies: devices of
    this process, each of which has its own."""

    side: int
    products: int
    megabytes: int
    seconds: float
    copies: int


@dataclass(frozen=True)
class Speed:
    """What the slowest replica of a host needed, in seconds. wrong: elements of all products that are."""

    host: int
    product: float
    memory: float
    wrong: float


def check_chips(
    backend: Backend,
    spec: RunSpec,
    chips: ExpectedChips,
    hosts: Sequence[CheckedHost],
    me: int,
    mode: CheckMode,
    come: Callable[[str], None],
) -> Iterator[SliceCheckLine]:
    """Yields the lines of all hosts, the same in every replica. A collective. me: this host. come: waits for all
    replicas at a point that is named."""
    on_cpu, copies = spec.hardware == "CPU", spec.slice.replicas // spec.slice.hosts
    copies = copies if spec.backend == "xla-spmd" else 1
    # On a chip 40 ms or more, far longer than it takes to send a program.
    effort = Effort(192, 4, 16, 0.2, copies) if on_cpu else Effort(4096, 64, 512, 0.1, copies)
    factor, ranks, slowest = SLOW_FACTOR_ON_CPU if on_cpu else SLOW_FACTOR, [], dict[int, Speed]()
    for number in range(_TRIES):
        row = [me, *_measure_product(backend, effort), _measure_memory(backend, effort)]
        # Only the gang's store tells who does not come.
        come(f"the end of measurement {number + 1}")
        rows = backend.gather(row)
        ranks = [int(row[0]) for row in rows]
        slowest = _best(slowest, rows)
        if not find_slow_hosts(slowest, factor):
            break
    for index, count in Counter(ranks).items():
        wanted = len(ranks) // len(hosts)
        count_line = judge(_CHIPS, "processes per host", count == wanted, str(count), str(wanted), number=float(count))
        yield from hosts[index].lines([count_line])
    yield from judge_speeds(chips, slowest, hosts, effort, factor)
    if spec.slice.replicas == 1:
        yield judge(_CHIPS, "sums", None, advice="there is one replica")
        return
    sums = KnownSums(backend, spec, ranks)
    for size in SIZES if mode is CheckMode.FULL else (FAST_SIZE,):
        for level in sums.levels[0 if mode is CheckMode.FULL else -1 :]:
            if not on_cpu or size <= LARGEST_ON_CPU:
                come(f"the sum of {size} bytes over {level}")
                yield from _check_sum(sums, level, size, chips, hosts)


def _best(before: dict[int, Speed], rows: Sequence[Sequence[float]]) -> dict[int, Speed]:
    """Returns each host's slowest replica, in the best measurement so far."""
    best: dict[int, Speed] = {}
    for index in dict.fromkeys(int(row[0]) for row in rows):
        product, wrong, memory = zip(*(row[1:] for row in rows if row[0] == index), strict=True)
        old = before.get(index, Speed(index, max(product), max(memory), 0.0))
        faster = min(old.product, max(product)), min(old.memory, max(memory))
        best[index] = Speed(index, *faster, old.wrong + sum(wrong))
    return best


def find_slow_hosts(speeds: dict[int, Speed], factor: float) -> dict[int, float]:
    """Returns the slow hosts, with how many times as long as the others they take: a host is slow whose product or
    memory takes more than `factor` times as long as the median of the other hosts'. The median, so that several slow
    hosts do not excuse each other; of two hosts, the other one is the median."""
    slow: dict[int, float] = {}
    for index, own in speeds.items():
        others = [speed for other, speed in speeds.items() if other != index]
        if others:
            product = own.product / median_low(other.product for other in others)
            slower = max(product, own.memory / median_low(other.memory for other in others))
            slow |= {index: slower} if slower > factor else {}
    return slow


def judge_speeds(
    chips: ExpectedChips, speeds: dict[int, Speed], hosts: Sequence[CheckedHost], effort: Effort, factor: float
) -> Iterator[SliceCheckLine]:
    """Judges each host against the peaks, where they are known, and against the other hosts."""
    per_device = 1 / max(chips.devices_per_chip, 1)
    tflop = 2 * effort.side**3 * effort.products / 1e12
    gigabytes = 2 * _REWRITES * effort.megabytes * (1 << 20) / 1e9
    slow = find_slow_hosts(speeds, factor)
    for index, speed in sorted(speeds.items()):
        lines = [
            judge(_CHIPS, "exact products", not speed.wrong, f"{speed.wrong:.0f} wrong elements", "0", _REPAIR),
            _judge_share("bfloat16 product", tflop / speed.product, "TFLOP/s", chips.bf16_tflops * per_device),
            _judge_share("memory", gigabytes / speed.memory, "GB/s", chips.hbm_gb_per_second * per_device),
        ]
        if len(hosts) > 1:
            slower = slow.get(index)
            measured = f"takes {slower:.1f} times as long as the others" if slower else "as fast as the others"
            expected = f"at most {factor:g} times as long"
            lines.append(judge(_CHIPS, "slow host", slower is None, measured, expected, _REPAIR))
        yield from hosts[index].lines(lines)


def _judge_share(name: str, value: float, unit: str, peak: float, least: float = LEAST_SHARE) -> SliceCheckLine:
    if not peak:
        return judge(_CHIPS, name, True, f"{value:.3g} {unit}", number=value, unit=unit)
    measured, expected = f"{value:.3g} {unit}, {value / peak:.0%} of the peak", f"{least:.0%} of {peak:.4g} {unit}"
    advice = f"throttled, shared or broken: {_REPAIR}"
    return judge(_CHIPS, name, value >= least * peak, measured, f"at least {expected}", advice, value, unit)


def _measure_product(backend: Backend, effort: Effort) -> tuple[float, float]:
    """Multiplies small integers by a permutation, which bfloat16 does exactly. Returns the seconds, and how many
    elements are wrong."""
    side, count = effort.side, effort.products
    values = (torch.arange(side * side).reshape(side, side) % 251 - 125).to(torch.bfloat16)
    turn = torch.eye(side, dtype=torch.bfloat16).roll(1, dims=1)[None]
    # In one program over several devices, rows are divided among them, and a single row goes to all.
    rows = [tensor.repeat(effort.copies, 1) for tensor in (values, values.roll(count, dims=1))]
    left, expected, right = backend.to_device([*rows, turn])

    def multiply() -> float:
        result: Tensor = left
        for _ in range(count):
            result = result @ right[0]
        return float(backend.to_host([(result != expected).to(torch.float32).sum()])[0])

    return _pace(multiply, effort), multiply()


def _measure_memory(backend: Backend, effort: Effort) -> float:
    """Reads and writes a tensor several times, each time in a program of its own, so that none is left out."""
    tensor: Tensor = backend.to_device(torch.zeros(effort.copies * effort.megabytes << 18))

    def rewrite() -> None:
        current = tensor
        for _ in range(_REWRITES):
            current = current + 1.0
            backend.sync()
        backend.to_host([current[:1].clone()])

    return _pace(rewrite, effort)


def _pace(work: Callable[[], object], effort: Effort) -> float:
    """Returns the seconds of the work in the better of two rounds, after a first time that may compile."""
    work()
    best = float("inf")
    for _ in range(2):
        began, count, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < effort.seconds:
            work()
            count, elapsed = count + 1, time.perf_counter() - began
        best = min(best, elapsed / count)
    return best


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
        yield from (own for index in sorted(places) for own in hosts[index].lines([line]))
        yield from () if places else (line,)
        return
    speed = sums.bytes_sent(level, size) / 1e9 / max(result.seconds for result in results)
    peak = chips.ici_gb_per_second / max(chips.devices_per_chip, 1) if (level, size) == (SLICE, SIZES[-1]) else 0.0
    yield judge(_CHIPS, name, True, f"exact, {speed:.3g} GB/s", "exact", number=speed, unit="GB/s")
    if peak:
        yield _judge_share("links of the slice", speed, "GB/s", peak, LEAST_LINK_SHARE)


def find_ranks_at_fault(wrong: Sequence[bool], odd: Sequence[int]) -> list[int]:
    """Returns the ranks at fault for sums of which at least one is wrong: those with a wrong sum, unless all have one;
    otherwise the rank whose part all of them find wrong. Empty if nothing tells."""
    if not all(wrong):
        return [rank for rank, is_wrong in enumerate(wrong) if is_wrong]
    return sorted({*odd} - {-1}) if len({*odd}) == 1 else []
