"""What the slice check says of a pod, of the network and of measured speeds, without a slice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.device_plugin import device_plugin
from tests.contract.slices import job_on, pod_env
from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import RunSpec, TorchSpec, parse_run_spec
from tpu_contract.slice_check import CheckMode, ExpectedChips, LineVerdict, SliceCheckLine, SliceSection
from tpu_trainer.checks.slice import chips, network, pod
from tpu_trainer.checks.slice.chips import Effort, Speed
from tpu_trainer.checks.slice.lines import CheckedHost, attempt, judge, merge
from tpu_trainer.checks.slice.network import HostReport
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
    lines = pod.check_pod(on_tpu(), FOUR, {}, a_pod(tmp_path, VFIO), CheckMode.FAST)
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
    found = network_verdicts(*(HostReport((), value, doubt) for value in ahead))
    assert [index for index, (_, clock) in enumerate(found) if clock is FAILED] == wrong


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
        index: Speed(index, *((1.0, value) if of_memory else (value, 1.0)), 0.0) for index, value in enumerate(product)
    }
    assert list(chips.find_slow_hosts(speeds, 1.5)) == slow


EFFORT = Effort(4096, 64, 512, 0.1, 1)
PEAKS = ExpectedChips(bf16_tflops=197, hbm_gb_per_second=819)


@pytest.mark.parametrize(
    ("speed", "failed"),
    [
        (Speed(0, 0.06, 0.015, 0.0), []),
        (Speed(0, 0.6, 0.015, 0.0), ["bfloat16 product"]),
        (Speed(0, 0.06, 0.1, 0.0), ["memory"]),
        (Speed(0, 0.06, 0.015, 3.0), ["exact products"]),
    ],
)
def test_a_chip_is_judged_by_its_peaks(speed: Speed, failed: list[str]) -> None:
    lines = chips.judge_speeds(PEAKS, {0: speed}, HOSTS[:1], EFFORT, 1.5)
    assert [line.name for line in lines if line.verdict is FAILED] == failed


def test_without_peaks_a_speed_is_only_told() -> None:
    lines = list(chips.judge_speeds(ExpectedChips(), {0: Speed(0, 60.0, 15.0, 0.0)}, HOSTS[:1], EFFORT, 1.5))
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
