"""What the container itself is and may do: rights, device files, memory, versions, environment.

It takes no library, no chip and only milliseconds; libtpu would try for minutes to open a chip that is denied.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path

from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import ExpectedChips, SliceCheckLine, SliceSection
from tpu_trainer.checks.slice.lines import attempt, judge
from tpu_trainer.worker.tpu_host import chip_files, may_open

_POD = SliceSection.POD
_MIB = 1 << 20
_SHM = "/dev/shm"  # noqa: S108 - it is tried, not used
_CAPABILITIES = {14: "IPC_LOCK", 17: "SYS_RAWIO", 21: "SYS_ADMIN", 24: "SYS_RESOURCE"}
"""Those that decide about devices and locked memory, by their bits (capability.h)."""

_LIBTPU_FOR_TPU7X, _LIBTPU_FOR_TORCH_TPU = (0, 0, 22), (0, 0, 50)
"""The first libtpu that knows the chip, and the first that TorchTPU runs on."""

_PACKAGES = ("torch", "torch_xla", "torch_tpu", "libtpu")


def check_pod(
    spec: RunSpec,
    chips: ExpectedChips,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    *,
    is_full: bool = True,
) -> list[SliceCheckLine]:
    """Returns the lines of this container. root: where /dev, /proc and /sys are. is_full: False leaves out what another
    host would not do better."""
    lines = [
        *attempt(_POD, "rights", lambda: _describe_rights(root)),
        *attempt(_POD, _SHM, lambda: _check_shared_memory(root / _SHM[1:])),
    ]
    if is_full:
        lines += attempt(_POD, "versions", lambda: check_versions(spec, _installed()))
    if spec.hardware == "TPU":
        lines += attempt(_POD, "device files", lambda: _check_devices(chips, root))
        lines += attempt(_POD, "environment", lambda: check_environment(spec, chips, environ))
    return lines


def _describe_rights(root: Path) -> Iterator[SliceCheckLine]:
    yield judge(_POD, "user", True, f"uid {os.geteuid()}, gid {os.getegid()}, groups {os.getgroups()}")
    held = int((root / "proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    names = [name for bit, name in _CAPABILITIES.items() if held >> bit & 1]
    yield judge(_POD, "capabilities", True, f"{', '.join(names) or 'none for devices'}; {held.bit_count()} in all")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = soft == resource.RLIM_INFINITY or "IPC_LOCK" in names
    yield judge(_POD, "locked memory", True, "without limit" if free else f"up to {soft // 1024} KiB")
    reserved = re.search(r"HugePages_Total:\s+(\d+)", (root / "proc/meminfo").read_text())
    mode = root / "sys/kernel/mm/transparent_hugepage/enabled"
    transparent = re.search(r"\[(\w+)\]", mode.read_text() if mode.exists() else "[unknown]")
    words = [found[1] if found else "0" for found in (transparent, reserved)]
    yield judge(_POD, "huge pages", True, f"transparent: {words[0]}, reserved: {words[1]}")


def _check_devices(chips: ExpectedChips, root: Path) -> Iterator[SliceCheckLine]:
    """Counts the chips' files and asks whether this user may open them. By a failed line's words the operator tells a
    chip that is denied, an error of the user's, from one that is missing (failures.table)."""
    files = chip_files(root)
    groups = [path for path in files if path.parent.name == "vfio" and path.name.isdecimal()]
    accel = [path for path in files if path.parent.name != "vfio"]
    # A chip with two devices has two VFIO groups; on v2 and v3, a single file.
    wanted = max(chips.chips_per_host * (chips.devices_per_chip if groups else 1), 1)
    found = len(groups or accel)
    troubles = [f"/{path.relative_to(root)}: Permission denied" for path in files if not may_open(path)]
    advice = "set trainer.securityContext: runAsUser: 0, or the file's group in supplementalGroups"
    if not troubles:
        advice = "have the node repaired"
    if found < wanted:
        troubles.append(f"No such device for {wanted - found} of {wanted} chips: /dev/vfio, /dev/accel*")
    good = not troubles and (found == wanted or not chips.chips_per_host)
    measured = "; ".join(troubles) or f"{found} that this user may open"
    yield judge(_POD, "device files", good, measured, str(wanted), advice, float(found))


def _check_shared_memory(place: Path) -> Iterator[SliceCheckLine]:
    size, probe = os.statvfs(place), place / f"slice-check-{os.getpid()}"
    room = float(size.f_frsize * size.f_blocks // _MIB)
    advice = "mount a writable volume in memory there, which loader processes need (trainer.sharedMemory)"
    try:
        probe.write_bytes(bytes(_MIB))
        probe.unlink()
        yield judge(_POD, _SHM, True, f"{room:.0f} MiB, writable", "writable", "", room, "MiB")
    except OSError as error:
        yield judge(_POD, _SHM, False, f"{error.strerror}", "writable", advice, room, "MiB")


def _installed() -> dict[str, str]:
    """Returns the versions of the libraries that must fit each other, without importing them."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def check_versions(spec: RunSpec, found: Mapping[str, str]) -> Iterator[SliceCheckLine]:
    """Holds the libraries against each other and against the chip's generation."""
    generation, on_xla = spec.slice.generation, spec.backend != "torch"
    on_torch_tpu = not on_xla and spec.torch.device == "tpu"
    numbers = {name: tuple(int(part) for part in re.findall(r"\d+", text)[:3]) for name, text in found.items()}
    least = _LIBTPU_FOR_TORCH_TPU if on_torch_tpu else _LIBTPU_FOR_TPU7X if generation == "tpu7x" else (0,)
    needs_libtpu = spec.hardware == "TPU"
    troubles = {
        "torch_xla is missing": on_xla and "torch_xla" not in found,
        "torch_xla is built for another torch": on_xla
        and numbers.get("torch_xla", ())[:2] != numbers.get("torch", ())[:2],
        "torch_tpu is missing": on_torch_tpu and "torch_tpu" not in found,
        f"TorchTPU finds no chips of {generation}": on_torch_tpu and generation in ("v2", "v3", "v4"),
        f"libtpu is older than {'.'.join(map(str, least))}": needs_libtpu and numbers.get("libtpu", least) < least,
        "libtpu is missing": needs_libtpu and "libtpu" not in found,
    }
    wrong = [trouble for trouble, there in troubles.items() if there]
    text = ", ".join(f"{name} {text}" for name, text in found.items())
    advice = "use the trainer's image, whose libraries fit each other and this generation (docs/versions.md)"
    yield judge(_POD, "versions", not wrong, "; ".join([*wrong, text]), "", advice)


def check_environment(spec: RunSpec, chips: ExpectedChips, environ: Mapping[str, str]) -> Iterator[SliceCheckLine]:
    """Compares what GKE's device plugin says of the slice with what the operator computed. A variable that is not set
    contradicts nothing."""
    hosts = spec.slice.hosts // spec.slice.slices
    wanted: dict[str, tuple[object, Callable[[str], object]]] = {
        "TPU_TOPOLOGY": (spec.slice.topology, str),
        "TPU_ACCELERATOR_TYPE": (chips.accelerator_type, str),
        "TPU_CHIPS_PER_HOST_BOUNDS": (chips.chips_per_host, _multiply),
        "TPU_HOST_BOUNDS": (hosts, _multiply),
        "TPU_WORKER_HOSTNAMES": (hosts, lambda text: len(text.split(","))),
    }
    there = {name: environ[name] for name in wanted if environ.get(name)}
    troubles = [
        f"{name}={text}" for name, text in there.items() if wanted[name][0] not in ("", 0, wanted[name][1](text))
    ]
    if not 0 <= int(environ.get("TPU_WORKER_ID", "0")) < hosts:
        troubles.append(f"TPU_WORKER_ID={environ['TPU_WORKER_ID']}")
    expected = f"{chips.accelerator_type or spec.slice.generation} of {spec.slice.topology} on {hosts} hosts"
    measured = "; ".join(troubles) or f"agree: {', '.join(there) or 'none is set'}"
    advice = "the node is of another slice than the job's: correct spec.slice, or the labels of the node pool"
    yield judge(_POD, "environment", not troubles, measured, expected, advice)


def _multiply(bounds: str) -> int:
    return prod(int(side) for side in bounds.split(","))
