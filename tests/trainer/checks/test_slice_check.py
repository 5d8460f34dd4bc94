"""The slice check in real gangs: it passes where nothing is wrong, and finds and names each fault that is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.checkpoint.refusing_server import answering
from tests.trainer.gang_processes import Gang, Launcher, run_spec
from tpu_contract.protocol import ExitCode
from tpu_contract.slice_check import LineVerdict, SliceCheckLine, SliceSection, SliceTable, find_slice_check

UNFIT, LOST, FINE = ExitCode.SliceUnfit, ExitCode.PeerLost, ExitCode.Succeeded
POD_1 = "small-1-0-1"


def check(launcher: Launcher, mode: str, hosts: int = 3, backend: str = "torch", **changes: object) -> Gang:
    """A gang under the slice check; `mode` may name a fault and its host (`slice_checking`)."""
    replicas = 4 if backend == "xla-spmd" else hosts
    spec = run_spec(backend=backend, hosts=hosts, replicas=replicas, batch={"global": 12, "perReplica": 12 // replicas})
    env = {name: str(changes.pop(name)) for name in tuple(changes) if name.isupper()}
    return launcher.start({**spec, **changes}, module="tests.trainer.slice_checking", TEST_SLICE_CHECK=mode, **env)


def table_of(gang: Gang) -> SliceTable:
    found = find_slice_check(gang.hosts[0].output)
    assert found is not None, gang.output()
    return found


def failed(gang: Gang) -> list[tuple[str, str]]:
    """The failed lines of the table: host and name."""
    return [(line.host, line.name) for line in table_of(gang).failed]


def not_tried(gang: Gang, section: SliceSection) -> list[SliceCheckLine]:
    return [line for line in table_of(gang).lines if (line.section, line.verdict) == (section, LineVerdict.NOT_TRIED)]


@pytest.mark.parametrize(("backend", "hosts"), [("torch", 2), ("xla", 2), ("xla-spmd", 1)])
def test_a_slice_without_a_fault_passes_every_line(
    launcher: Launcher, tmp_path: Path, backend: str, hosts: int
) -> None:
    place = {"uri": str(tmp_path / "kept"), "keep": 3}
    gang = check(launcher, "full", hosts, backend, checkpoint=place)
    assert gang.wait() == [FINE] * hosts, gang.output()
    table = table_of(gang)
    assert table.passed, gang.output()
    names = {(line.section, line.name) for line in table.lines if line.verdict is LineVerdict.OK}
    wanted = {
        SliceSection.POD: ("user", "locked memory", "/dev/shm", "versions"),
        SliceSection.STORAGE: ("storage", "storage, write", "storage, read"),
        SliceSection.CHIPS: ("exact products", "bfloat16 product", "memory", "sum over the slice, 16 MB"),
        SliceSection.RUN: ("train", "stop", "resume", "bit for bit"),
    }
    assert {(section, name) for section, of_section in wanted.items() for name in of_section} <= names
    assert {"pod", "meeting", "start", "chips", "first step", "train", "stop", "resume"} <= set(table.seconds)
    assert not [file for file in (tmp_path / "kept").rglob("*") if file.is_file()]


@pytest.mark.parametrize("fault", ["part 1", "result 1", "product 1", "slow 1"])
def test_a_fault_of_one_host_ends_that_host_before_the_first_step(launcher: Launcher, fault: str) -> None:
    gang = check(launcher, f"fast {fault}")
    assert gang.wait() == [LOST, UNFIT, LOST], gang.output()
    name = {"part": "sum over the slice, 1 MB", "result": "sum over the slice, 1 MB", "product": "exact products"}
    words = gang.hosts[1].message()
    assert words["sliceCheck"]["host"] == POD_1
    assert words["sliceCheck"]["name"] == name.get(fault.partition(" ")[0], "slow host")
    assert POD_1 in gang.hosts[0].message()["message"]
    assert "step 1/" not in gang.output()


def test_a_passed_fast_check_is_followed_by_the_training(launcher: Launcher) -> None:
    gang = check(launcher, "fast", hosts=2)
    assert gang.wait() == [FINE] * 2, gang.output()
    assert gang.hosts[0].message()["step"] == 24
    assert "the slice passed its check" in gang.hosts[0].output


def test_a_port_that_does_not_answer_is_charged_to_its_host(launcher: Launcher) -> None:
    gang = check(launcher, "full port 1")
    assert gang.wait() == [LOST, UNFIT, LOST], gang.output()
    assert failed(gang) == [(POD_1, "names and ports")]
    (line,) = table_of(gang).failed
    assert "small-1-0-0 cannot reach small-1-0-1" in line.measured
    assert not_tried(gang, SliceSection.CHIPS)


def test_a_host_that_never_comes_is_named(launcher: Launcher) -> None:
    gang = check(launcher, "full away 1", hosts=2, TEST_MEETING_SECONDS="3")
    assert gang.wait() == [LOST, 9], gang.output()
    assert failed(gang) == [(POD_1, "all workers come")]
    assert not table_of(gang).complete


def test_a_denied_bucket_is_a_failed_line_and_the_rest_goes_on(launcher: Launcher) -> None:
    with answering(403, "trainer@p does not have storage.objects.create access") as address:
        place = {"uri": "gs://of-others/run", "keep": 1}
        gang = check(launcher, "full", hosts=1, checkpoint=place, STORAGE_EMULATOR_HOST=f"http://{address}")
        assert gang.wait() == [UNFIT], gang.output()
    storage = [line for line in table_of(gang).failed if line.section is SliceSection.STORAGE]
    assert [(line.host, line.name) for line in storage] == [("small-1-0-0", "storage")]
    assert "permission denied" in storage[0].measured
    assert "Traceback" not in gang.hosts[0].output


def test_a_hosts_missing_chips_are_found_before_its_libraries_are_imported(launcher: Launcher) -> None:
    gang = check(launcher, "fast", hosts=1, backend="xla", hardware="TPU")
    assert gang.wait() == [UNFIT], gang.output()
    words = gang.hosts[0].message()
    assert words["sliceCheck"]["name"] == "device files"
    assert "No such device for 1 of 1 chips: /dev/vfio" in words["message"]


def test_an_unknown_mode_is_refused(launcher: Launcher) -> None:
    gang = check(launcher, "quick", hosts=1)
    assert gang.wait() == [ExitCode.BadSpec]
    assert gang.hosts[0].message()["message"] == "slice-check: the mode is full or fast, got 'quick'"
