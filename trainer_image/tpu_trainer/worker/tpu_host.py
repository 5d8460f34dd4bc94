"""A TPU host before libtpu opens its chips, and after libtpu has failed.

libtpu tries for minutes to open a chip that it may not open, and says why only in a file of the node, which GKE's
device plugin empties for the next container. So this asks first, and copies that file's end into the worker's own log.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from tpu_contract.words import several
from tpu_trainer.contract.errors import BadSpecError

# v3 and v4 have /dev/accel*; newer generations a group of VFIO for each chip, and the file by which it is driven.
_CHIPS = ("dev/accel[0-9]*", "dev/vfio/[0-9]*", "dev/vfio/vfio")
_LOGS, _LEVEL = "/tmp/tpu_logs", ".INFO."  # noqa: S108 - the device plugin mounts it; a file of this level has them all
_MOST_LOGS, _LONGEST_LOG = 8, 4096
_SHOWN = 4


def prepare(environ: MutableMapping[str, str], root: Path = Path("/")) -> str:
    """Makes this process and its children ready for libtpu, and describes the rights that only the node can change.

    Raises:
        BadSpecError: this user may not open the chips.
    """
    # For a privileged container GKE's device plugin names all chips of a tpu7x host. torch_xla names each process its
    # own, but only if the variable is not set.
    environ.pop("TPU_VISIBLE_CHIPS", None)
    line = f"runs as user {os.geteuid()} of group {os.getegid()}; may lock memory {_raise_lock_limit()}"
    if denied := [path for path in chip_files(root) if not may_open(path)]:
        raise BadSpecError(f"trainer.securityContext: {_describe(denied)}; {line}")
    return line


def _raise_lock_limit() -> str:
    """Lets the process lock as much memory as it can, for the chips' transfers: too little stops a training midway."""
    limit = resource.RLIMIT_MEMLOCK
    for wanted in (resource.RLIM_INFINITY, resource.getrlimit(limit)[1]):
        # Above the hard limit only with the capability SYS_RESOURCE.
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (wanted, wanted))
            break
    soft, _ = resource.getrlimit(limit)
    amount = "without limit" if soft == resource.RLIM_INFINITY else f"up to {soft // 1024} KiB"
    return f"{amount} (RLIMIT_MEMLOCK)"


def chip_files(root: Path) -> list[Path]:
    """Returns the files through which libtpu drives the chips of this host."""
    return [path for pattern in _CHIPS for path in sorted(root.glob(pattern))]


def may_open(path: Path) -> bool:
    """Returns whether this user may open the file. It is not opened: closing a chip may reset it."""
    return os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def _describe(denied: list[Path]) -> str:
    found = denied[0].stat()
    mode, group = stat.S_IMODE(found.st_mode), found.st_gid
    by_group = mode & stat.S_IRGRP and mode & stat.S_IWGRP
    remedy = f"supplementalGroups: [{group}]" if by_group else f"runAsUser: {found.st_uid}"
    return (
        f"user {os.geteuid()} may not open {several([str(path) for path in denied], _SHOWN)}: Permission denied"
        f" (owner {found.st_uid}, group {group}, mode {mode:04o}); set {remedy}"
    )


def ends_of_logs(environ: MutableMapping[str, str]) -> str:
    """Returns the last lines of libtpu's newest logs, one file for each process; empty if it wrote none."""
    files = [path for path in Path(environ.get("TPU_LOG_DIR", _LOGS)).glob("*") if path.is_file()]
    files = [path for path in files if not path.is_symlink() and path.stat().st_size]
    files = [path for path in files if _LEVEL in path.name] or files
    newest = sorted(files, key=lambda path: path.stat().st_mtime)[-_MOST_LOGS:]
    return "".join(f"the end of libtpu's {path.name}:\n{end}\n" for path in newest if (end := _end(path)))


def _end(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LOG))
        text = file.read(_LONGEST_LOG).decode(errors="replace")
        # The first line may be cut.
        return text.strip() if len(text) < _LONGEST_LOG else text.partition("\n")[2].strip()
    return ""
