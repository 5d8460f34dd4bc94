"""The slice check in real gangs: it passes where nothing is wrong, and finds and names each fault that is made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import cgroups
from tests.trainer.checkpoint.refusing_server import answering
from tests.trainer.gang_processes import TWO_PER_HOST, Gang, Launcher, chips, run_spec
from tpu_contract.protocol import ExitCode
from tpu_contract.slice_check import (
    SLICE_CHECK_MARKER,
    LineVerdict,
    SliceCheckLine,
    SliceSection,
    SliceTable,
    from_json,
)

UNFIT, LOST, FINE = ExitCode.SliceUnfit, ExitCode.PeerLost, ExitCode.Succeeded
POD_1 = "small-1-0-1"


def check(launcher: Launcher, mode: str, hosts: int = 3, backend: str = "torch", **changes: object) -> Gang:
    """A gang under the slice check; `mode` may name a fault and its host (`slice_checking`)."""
    replicas = 4 if backend == "xla-spmd" else hosts
    spec = run_spec(backend=backend, hosts=hosts, replicas=replicas, batch={"global": 12, "perReplica": 12 // replicas})
    env = {name: str(changes.pop(name)) for name in tuple(changes) if name.isupper()}
    return launcher.start({**spec, **changes}, module="tests.trainer.slice_checking", TEST_SLICE_CHECK=mode, **env)


def table_of(gang: Gang) -> SliceTable:
    (found,) = (line for line in gang.hosts[0].output.splitlines() if line.startswith(SLICE_CHECK_MARKER))
    return from_json(found.removeprefix(SLICE_CHECK_MARKER))


def failed(gang: Gang) -> list[tuple[str, str]]:
    """The failed lines of the table: host and name."""
    return [(line.host, line.name) for line in table_of(gang).failed]


def not_tried(gang: Gang, section: SliceSection) -> list[SliceCheckLine]:
    return [line for line in table_of(gang).lines if (line.section, line.verdict) == (section, LineVerdict.NOT_TRIED)]


TWO_SLICES = {
    "slice": {"generation": "v5e", "topology": "2x4", "slices": 2, "hosts": 2, "replicas": 4},
    "batch": {"global": 12, "perReplica": 3},
    "torch": TWO_PER_HOST,
}


@pytest.mark.parametrize(
    ("backend", "hosts", "changes", "levels"),
    [
        ("torch", 2, TWO_SLICES, ["a host", "the slice", "all slices"]),
        ("xla", 2, {}, ["the slice"]),
        ("xla-spmd", 1, {}, ["the slice"]),
    ],
    ids=["torch", "xla", "xla-spmd"],
)
def test_a_slice_without_a_fault_passes_every_line(
    launcher: Launcher, tmp_path: Path, backend: str, hosts: int, changes: dict[str, Any], levels: list[str]
) -> None:
    """And sums are made within a host, within a slice, and over slices."""
    place = {"uri": str(tmp_path / "kept"), "keep": 3}
    gang = check(launcher, "full", hosts, backend, checkpoint=place, **changes)
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
    sums = [line.name for line in table.lines if line.name.endswith("1 MB")]
    assert sums == [f"sum over {level}, 1 MB" for level in levels]
    assert {"pod", "meeting", "start", "chips", "first step", "train", "stop", "resume"} <= set(table.seconds)
    assert not [*(tmp_path / "kept").iterdir()]


@pytest.mark.parametrize(
    ("fault", "hosts", "name"),
    [
        ("part", 3, "sum over the slice, 1 MB"),
        ("result", 3, "sum over the slice, 1 MB"),
        ("product", 2, "exact products"),
        ("slow", 2, "slow host"),
    ],
)
def test_a_fault_of_one_host_ends_that_host_before_the_first_step(
    launcher: Launcher, fault: str, hosts: int, name: str
) -> None:
    gang = check(launcher, f"fast {fault} 1", hosts)
    assert gang.wait() == [LOST, UNFIT, LOST][:hosts], gang.output()
    words = gang.hosts[1].message()
    assert (words["sliceCheck"]["host"], words["sliceCheck"]["name"]) == (POD_1, name)
    assert POD_1 in gang.hosts[0].message()["message"]
    assert "step 1/" not in gang.output()


def test_a_passed_fast_check_is_followed_by_the_training(launcher: Launcher) -> None:
    gang = check(launcher, "fast", hosts=2)
    assert gang.wait() == [FINE] * 2, gang.output()
    assert gang.hosts[0].message()["step"] == 24
    assert "the slice passed its check" in gang.hosts[0].output


def test_what_the_fast_half_has_no_time_for_is_said_and_the_training_begins(launcher: Launcher) -> None:
    gang = check(launcher, "fast late 1", hosts=2)
    assert gang.wait() == [FINE] * 2, gang.output()
    assert "sums: not tried; 20 s were over" in gang.hosts[0].output
    assert gang.hosts[0].message()["step"] == 24


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


def test_a_host_that_hangs_is_named_by_the_others_and_ends_itself(launcher: Launcher) -> None:
    gang = check(launcher, "full hang 1", hosts=2, TEST_COME_SECONDS="20")
    assert gang.wait() == [LOST, UNFIT], gang.output()
    (line,) = table_of(gang).failed
    assert line.host == POD_1
    assert "small-1-0-1 did not come to the end of measurement 1" in line.measured
    assert gang.hosts[1].message()["sliceCheck"]["host"] == POD_1


def test_a_denied_bucket_is_a_failed_line_and_the_rest_goes_on(launcher: Launcher) -> None:
    with answering(403, "trainer@p does not have storage.objects.create access") as address:
        place = {"uri": "gs://of-others/run", "keep": 1}
        gang = check(launcher, "full", hosts=1, checkpoint=place, STORAGE_EMULATOR_HOST=f"http://{address}")
        assert gang.wait() == [UNFIT], gang.output()
    storage = [line for line in table_of(gang).failed if line.section is SliceSection.STORAGE]
    assert [(line.host, line.name) for line in storage] == [("small-1-0-0", "storage")]
    assert "permission denied" in storage[0].measured
    assert "Traceback" not in gang.hosts[0].output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")
def test_a_host_that_is_slowed_by_its_cgroup_is_named(launcher: Launcher, tmp_path: Path) -> None:
    group = f"tpu-slice-check-{tmp_path.name}"
    cgroups.create(group)
    try:
        gang = check(launcher, "fast throttled 1", hosts=2, TEST_CGROUP=cgroups.limit_cpu(group, 0.02))
        assert gang.wait() == [LOST, UNFIT], gang.output()
    finally:
        cgroups.remove(group)
    words = gang.hosts[1].message()["sliceCheck"]
    assert (words["host"], words["name"]) == (POD_1, "slow host")
    assert "held back by its cgroup's limit" in words["measured"]


def test_chips_with_a_process_each_pass(launcher: Launcher) -> None:
    spec = run_spec(backend="xla", hardware="TPU", replicas=2)
    gang = launcher.start(spec, module="tests.trainer.slice_checking_on_chips", TEST_SLICE_CHECK="full", **chips(2))
    assert gang.wait() == [FINE], gang.output()
    assert table_of(gang).passed


def alone(folder: Path, mode: str, *within: str, **changes: object) -> tuple[int, dict[str, Any]]:
    """Runs the real command, within another, on the second of two hosts, of which the first never comes. Returns its
    exit code and last words. It must end before it imports torch."""
    (folder / "run.json").write_text(json.dumps(run_spec(hosts=2, replicas=2, **changes)))
    env = {"TPUJOB_RUN_SPEC": str(folder / "run.json"), "TPUJOB_NUM_HOSTS": "2", "TPUJOB_HOST_INDEX": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TPUJOB_TERMINATION_LOG": str(folder / "words")}
    command = [*within, sys.executable, "-X", "importtime", "-m", "tpu_trainer", "slice-check", mode]
    ended = subprocess.run(command, env={**os.environ, **env}, capture_output=True)
    assert not re.search(rb"\| +torch$", ended.stderr, re.MULTILINE)
    return ended.returncode, json.loads((folder / "words").read_bytes())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mounts")
def test_a_read_only_dev_shm_ends_its_host_before_the_others_are_met(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    code, words = alone(tmp_path, "fast", "unshare", "-m", "sh", "-c", mount, "sh")
    assert code == UNFIT
    found = words["sliceCheck"]
    assert (found["host"], found["name"], found["measured"]) == (POD_1, "/dev/shm", "Read-only file system")


def test_a_hosts_missing_chips_are_found_before_its_libraries_are_imported(tmp_path: Path) -> None:
    code, words = alone(tmp_path, "fast", backend="xla", hardware="TPU")
    assert code == UNFIT
    assert words["sliceCheck"]["name"] == "device files"
    assert "No such device for 1 of 1 chips: /dev/vfio" in words["message"]


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    code, words = alone(tmp_path, "quick")
    assert code == ExitCode.BadSpec
    assert words["message"] == "slice-check: the mode is full or fast or fast-only, got 'quick'"
