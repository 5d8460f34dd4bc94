"""What the slice check says of a pod, of the network and of measured speeds, without a slice."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.contract.device_plugin import device_plugin
from tests.contract.slices import job_on, pod_env
from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import RunSpec, TorchSpec, parse_run_spec
from tpu_contract.slice_check import ExpectedChips, LineVerdict, SliceCheckLine, SliceSection
from tpu_trainer.checks.slice import chips, network, pod
from tpu_trainer.checks.slice.chips import Effort, Speed
from tpu_trainer.checks.slice.lines import CheckedHost, attempt, judge, merge
from tpu_trainer.checks.slice.network import HostMeeting, HostReport
from tpu_trainer.contract.errors import PeerLostError
from tpu_training_operator.api.catalogue import Shape, generations
from tpu_training_operator.domain.job.naming import WorkerId, workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.run_spec import run_spec as spec_of_operator
from tpu_training_operator.domain.objects.shared import config_map

OK, FAILED, NOT_TRIED = LineVerdict
HOSTS = [CheckedHost(index, f"job-1-0-{index}", f"node-{index}") for index in range(4)]


def on_tpu(**changes: Any) -> RunSpec:
    return replace(parse_run_spec(run_spec(backend="xla", hosts=2)), hardware="TPU", **changes)


def a_pod(root: Path, files: tuple[str, ...]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    (root / "proc/meminfo").write_text("HugePages_Total:       8\n")
    (root / "dev/shm").mkdir(parents=True)
    for file in files:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).touch()
    return root


def line_of(lines: list[SliceCheckLine], name: str) -> SliceCheckLine:
    (line,) = [line for line in lines if line.name == name]
    return line


FOUR = ExpectedChips(chips_per_host=4)
VFIO = tuple(f"dev/vfio/{group}" for group in (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("files", "expected", "measured"),
    [
        ((*VFIO, "dev/vfio/vfio"), FOUR, "4 that"),
        (tuple(f"dev/accel{chip}" for chip in range(4)), replace(FOUR, devices_per_chip=2), "4 that"),
        (VFIO, replace(FOUR, chips_per_host=2, devices_per_chip=2), "4 that"),
        (VFIO[:1], ExpectedChips(), "1 that"),
        (VFIO[:3], FOUR, "No such device for 1 of 4 chips"),
        ((), ExpectedChips(), "No such device for 1 of 1 chips"),
        (VFIO, replace(FOUR, chips_per_host=1), None),
    ],
)
def test_the_chips_of_a_host_are_counted(
    tmp_path: Path, files: tuple[str, ...], expected: ExpectedChips, measured: str | None
) -> None:
    line = line_of(pod.check_pod(on_tpu(), expected, {}, a_pod(tmp_path, files)), "device files")
    assert line.verdict is (OK if "that" in (measured or "") else FAILED)
    assert measured is None or line.measured.startswith(measured)


def test_a_chip_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "may_open", lambda path: path.name != "2")
    line = line_of(pod.check_pod(on_tpu(), FOUR, {}, a_pod(tmp_path, VFIO)), "device files")
    assert (line.verdict, line.measured) == (FAILED, "/dev/vfio/2: Permission denied")
    assert "securityContext" in line.advice


def test_a_read_only_dev_shm_is_found(tmp_path: Path) -> None:
    root = a_pod(tmp_path, ())
    (root / "dev/shm").rmdir()
    # No one may create files there, not even root.
    (root / "dev/shm").symlink_to("/proc/self")
    line = line_of(pod.check_pod(on_tpu(), FOUR, {}, root), "/dev/shm")
    assert (line.verdict, line.expected) == (FAILED, "writable")


def test_what_a_pod_cannot_tell_is_one_failed_line_and_the_others_go_on(tmp_path: Path) -> None:
    root = a_pod(tmp_path, VFIO)
    (root / "proc/self/status").unlink()
    lines = pod.check_pod(on_tpu(), FOUR, {}, root)
    assert line_of(lines, "rights").measured.startswith("FileNotFoundError: ")
    assert line_of(lines, "device files").verdict is OK


def test_the_fast_check_leaves_the_libraries_to_the_training(tmp_path: Path) -> None:
    lines = pod.check_pod(on_tpu(), FOUR, {}, a_pod(tmp_path, VFIO), is_full=False)
    assert "versions" not in {line.name for line in lines}


VERSIONS = {"torch": "2.9.0+cpu", "torch_xla": "2.9.0", "libtpu": "0.0.21"}
TORCH_TPU = {"torch": "2.15.0", "torch_tpu": "0.2.0", "libtpu": "0.0.52"}
WITH_TORCH_TPU = {"backend": "torch", "torch": TorchSpec("tpu", "tpu_dist", 4)}


@pytest.mark.parametrize(
    ("changes", "generation", "found", "trouble"),
    [
        ({}, "v5e", VERSIONS, None),
        ({}, "v5e", VERSIONS | {"torch": "2.8.1"}, "torch_xla is built for another torch"),
        ({}, "v5e", {"torch": "2.9.0", "libtpu": "0.0.21"}, "torch_xla is missing"),
        ({}, "v5e", {"torch": "2.9.0", "torch_xla": "2.9.0"}, "libtpu is missing"),
        ({}, "tpu7x", VERSIONS, "libtpu is older than 0.0.22"),
        ({"hardware": "CPU"}, "tpu7x", {"torch": "2.9.0", "torch_xla": "2.9.0"}, None),
        (WITH_TORCH_TPU, "v6e", TORCH_TPU, None),
        (WITH_TORCH_TPU, "v4", TORCH_TPU, "TorchTPU finds no chips of v4"),
        (WITH_TORCH_TPU, "v6e", TORCH_TPU | {"libtpu": "0.0.21"}, "libtpu is older than 0.0.50"),
        (WITH_TORCH_TPU, "v6e", VERSIONS, "torch_tpu is missing"),
        ({"backend": "torch", "hardware": "CPU"}, "v6e", {"torch": "2.9.0"}, None),
    ],
)
def test_libraries_are_held_against_each_other(
    changes: dict[str, Any], generation: str, found: dict[str, str], trouble: str | None
) -> None:
    spec = on_tpu()
    spec = replace(spec, slice=replace(spec.slice, generation=generation), **changes)
    (line,) = pod.check_versions(spec, found)
    assert line.verdict is (FAILED if trouble else OK)
    assert line.measured.startswith(trouble or "torch")


SHAPES = [
    pytest.param(shape, id=f"{shape.generation}-{shape.topology}-{shape.chips_per_host}t")
    for generation in generations().values()
    if generation.on_gke
    for shape in generation.shapes
]


def environment_of(shape: Shape, worker: WorkerId) -> tuple[RunSpec, ExpectedChips, dict[str, str]]:
    job = job_on(shape)
    resolution = resolve(job.spec)
    data = config_map(job, resolution, 1)["data"]
    generation = generations()[shape.generation]
    expected = ExpectedChips(shape.accelerator_type, shape.chips_per_host, generation.devices_per_chip)
    spec = parse_run_spec(spec_of_operator(job, resolution, 1))
    return spec, expected, device_plugin(shape) | pod_env(job, resolution, worker, data)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_device_plugin_sets_agrees_with_the_operator_on_every_slice(shape: Shape) -> None:
    last = workers(resolve(job_on(shape).spec).layout, 1)[-1]
    (line,) = pod.check_environment(*environment_of(shape, last))
    assert line.verdict is OK, line


@pytest.mark.parametrize(
    "wrong",
    [
        {"TPU_TOPOLOGY": "4x8"},
        {"TPU_ACCELERATOR_TYPE": "v6e-16"},
        {"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"},
        {"TPU_HOST_BOUNDS": "4,4,1"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_ID": "4"},
    ],
)
def test_a_node_of_another_slice_is_found(wrong: dict[str, str]) -> None:
    (shape,) = [s for s in generations()["v5e"].shapes if (s.topology, s.chips_per_host) == ("4x4", 4)]
    spec, expected, environ = environment_of(shape, WorkerId(1, 0, 3))
    (line,) = pod.check_environment(spec, expected, environ | wrong)
    ((name, value),) = wrong.items()
    assert line.verdict is FAILED
    assert line.measured == f"{name}={value}"


def network_verdicts(*reports: HostReport) -> list[tuple[LineVerdict, LineVerdict]]:
    """The verdicts of names and ports, and of the clock, on each host."""
    found = [list(network.judge_network(host, HOSTS, reports)) for host in HOSTS[: len(reports)]]
    return [(ports.verdict, clock.verdict) for ports, clock in found]


def blocked(*calls: int) -> HostReport:
    return HostReport([(called, 8476, "timed out") for called in calls])


@pytest.mark.parametrize(
    ("reports", "at_fault"),
    [
        ([HostReport()] * 4, []),
        ([blocked(2), blocked(2), HostReport(), blocked(2)], [2]),
        ([HostReport(), HostReport(), blocked(0, 1, 3), HostReport()], [2]),
        ([blocked(1), HostReport(), HostReport(), HostReport()], [1]),
        ([blocked(2, 3), blocked(2, 3), HostReport(), HostReport()], [2, 3]),
    ],
)
def test_a_blocked_port_is_charged_to_the_host_that_has_more_of_them(
    reports: list[HostReport], at_fault: list[int]
) -> None:
    found = network_verdicts(*reports)
    assert [index for index, (ports, _) in enumerate(found) if ports is FAILED] == at_fault


def test_a_blocked_port_is_told_with_both_hosts() -> None:
    line, _ = network.judge_network(HOSTS[1], HOSTS, [blocked(1), *[HostReport()] * 3])
    assert line.measured == "job-1-0-0 cannot reach job-1-0-1 at port 8476: timed out"


def test_after_its_time_a_host_calls_nobody() -> None:
    report = network._reach_all([(host, {"8476": 1, "0": 2}) for host in HOSTS[1:]], until=time.monotonic())
    assert report == HostReport([], untried=6)


def met(count: int, *present: int) -> list[Any]:
    """What each host that is present gets from an exchange of `count` hosts; the absent ones, if there are any."""
    store = HashStore()

    def exchange(index: int) -> Any:
        meeting = HostMeeting(
            store,
            parse_run_spec(run_spec(hosts=count, replicas=count, batch={"global": count, "perReplica": 1})),
            index,
        )
        try:
            return meeting.exchange("numbers", index, sum), meeting.exchange("names", str(index))
        except PeerLostError as error:
            return error.absent
        finally:
            meeting.leave()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(exchange, present))


def test_every_host_gets_what_host_0_makes_of_all_values() -> None:
    assert met(3, 0, 1, 2) == [(3, ["0", "1", "2"])] * 3


@pytest.mark.parametrize(("present", "absent"), [((0, 2), (1, 3)), ((1, 2), (0,))])
def test_hosts_that_give_nothing_are_named_by_all_others(
    monkeypatch: pytest.MonkeyPatch, present: tuple[int, ...], absent: tuple[int, ...]
) -> None:
    monkeypatch.setattr(network, "_MEETING_SECONDS", 1.0)
    assert met(4, *present) == [absent] * 2


def test_calls_for_which_there_was_no_time_are_no_verdict() -> None:
    late, others = HostReport(untried=3), [HostReport()] * 3
    line, _ = network.judge_network(HOSTS[0], HOSTS, [late, *others])
    assert (line.verdict, line.measured, line.advice) == (NOT_TRIED, "3 calls were not made", "20 s were over")
    assert network_verdicts(late, *others)[1:] == [(OK, OK)] * 3
    assert network_verdicts(replace(late, unreachable=[(0, 8476, "refused")]), *others)[0] == (FAILED, OK)


@pytest.mark.parametrize(
    ("ahead", "doubt", "wrong"),
    [
        ((0.0, 0.1, -0.2, 0.0), 0.0, []),
        ((0.0, 0.0, 5.0, 0.0), 0.0, [2]),
        ((0.0, 0.0, 5.0, 0.0), 4.5, []),
        # Host 0's own clock: all others differ from it.
        ((0.0, 7.0, 7.0, 7.1), 0.0, [0]),
    ],
)
def test_a_clock_is_compared_with_the_median_of_all(ahead: tuple[float, ...], doubt: float, wrong: list[int]) -> None:
    found = network_verdicts(*(HostReport(ahead=value, doubt=doubt) for value in ahead))
    assert [index for index, (_, clock) in enumerate(found) if clock is FAILED] == wrong


TPU, CPU = Effort(4096, 64, 512, 0.1), Effort(192, 4, 16, 0.2, 1, 3.0, on_cpu=True)


@pytest.mark.parametrize(
    ("product", "slow"),
    [
        ((1.0, 1.0, 1.1, 1.0), []),
        ((1.0, 1.0, 2.0, 1.0), [2]),
        ((1.0, 2.0, 2.0, 1.0), [1, 2]),
        ((1.0, 1.4, 1.0, 1.0), []),
        ((1.0, 4.0), [1]),
        ((1.0,), []),
    ],
)
@pytest.mark.parametrize("of_memory", [False, True])
def test_a_host_is_slow_by_the_median_of_the_others(
    product: tuple[float, ...], slow: list[int], of_memory: bool
) -> None:
    speeds = {
        index: Speed((1.0, 0.1, value) if of_memory else (value, 0.1, 1.0)) for index, value in enumerate(product)
    }
    assert list(chips.find_slow_hosts(speeds, TPU)[0]) == slow


USUAL = Speed((1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("speed", "verdict", "words"),
    [
        (USUAL, OK, "as fast as the others"),
        # Other processes had half of its cores.
        (Speed((2.0, 1.0, 9.0)), OK, "as fast as the others"),
        (Speed((9.0, 1.0, 1.0)), NOT_TRIED, "cannot tell: other processes had its CPUs"),
        (Speed((9.0, 1.0, 1.0), held=0.9), FAILED, "held back by its cgroup's limit for 90% of the time"),
        (Speed((9.0, 9.0, 1.0)), FAILED, "takes 9.0 times as long as the others"),
    ],
)
def test_on_cpus_a_host_is_slow_by_its_cpu_time_or_by_the_limit_of_its_cgroup(
    speed: Speed, verdict: LineVerdict, words: str
) -> None:
    speeds = {0: USUAL, 1: USUAL, 2: speed}
    (line,) = [
        line
        for line in chips.judge_speeds(ExpectedChips(), speeds, HOSTS[:3], CPU)
        if (line.host, line.name) == (HOSTS[2].pod, "slow host")
    ]
    assert (line.verdict, words in str(line)) == (verdict, True), line


PEAKS = ExpectedChips(bf16_tflops=197, hbm_gb_per_second=819)


@pytest.mark.parametrize(
    ("speed", "failed"),
    [
        (Speed((0.06, 0.1, 0.015)), []),
        (Speed((0.6, 0.1, 0.015)), ["bfloat16 product"]),
        (Speed((0.06, 0.1, 0.1)), ["memory"]),
        (Speed((0.06, 0.1, 0.015), wrong=3.0), ["exact products"]),
    ],
)
def test_a_chip_is_judged_by_its_peaks(speed: Speed, failed: list[str]) -> None:
    lines = chips.judge_speeds(PEAKS, {0: speed}, HOSTS[:1], TPU)
    assert [line.name for line in lines if line.verdict is FAILED] == failed


def test_without_peaks_a_speed_is_only_told() -> None:
    lines = list(chips.judge_speeds(ExpectedChips(), {0: Speed((60.0, 1.0, 15.0))}, HOSTS[:1], TPU))
    assert {line.verdict for line in lines} == {OK}
    assert line_of(lines, "memory").number == pytest.approx(2 * 8 * 512 * 2**20 / 1e9 / 15.0)


@pytest.mark.parametrize(
    ("wrong", "odd", "at_fault"),
    [
        ([False, True, False], [-1, -1, -1], [1]),
        ([True, True, True], [2, 2, 2], [2]),
        ([True, True, True], [2, 1, 2], []),
        ([True, True, True], [-1, -1, -1], []),
    ],
)
def test_a_wrong_sum_is_charged_to_a_rank(wrong: list[bool], odd: list[int], at_fault: list[int]) -> None:
    assert chips.find_ranks_at_fault(wrong, odd) == at_fault


def test_lines_that_are_alike_become_one_with_the_worst_number() -> None:
    speeds = [judge(SliceSection.CHIPS, "memory", True, f"{value} GB/s", "", "", value, "GB/s") for value in (3.0, 2.0)]
    users = [judge(SliceSection.POD, "user", True, "uid 0")] * 2
    lines = [line for host, *own in zip(HOSTS, speeds, users, strict=False) for line in host.lines(own)]
    assert merge(lines) == [
        judge(SliceSection.POD, "user", True, "uid 0"),
        judge(SliceSection.CHIPS, "memory", True, "at worst 2.0 GB/s", "", "", 2.0, "GB/s"),
    ]


def test_failed_lines_keep_their_hosts() -> None:
    lines = [line for host in HOSTS[:2] for line in host.lines([judge(SliceSection.POD, "user", False, "uid 0")])]
    assert [line.host for line in merge(lines)] == ["job-1-0-0", "job-1-0-1"]


def test_a_lost_peer_ends_a_probe_and_is_no_line_of_this_host() -> None:
    def probe() -> list[SliceCheckLine]:
        raise PeerLostError("job-1-0-2 did not come")

    with pytest.raises(PeerLostError):
        attempt(SliceSection.CHIPS, "chips", probe)
