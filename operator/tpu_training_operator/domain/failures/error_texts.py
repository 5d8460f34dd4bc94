"""What the errors say that Kubernetes gives no name of their own: patterns for the classifier's table.

The kubelet hands on the words of the registry, the container runtime and its device manager; libtpu and the kernel's
stand in the worker's last words. Narrow on purpose: what is missed has an exit code still, what is mistaken has not.

A tenant writes these texts, and may write them to be slow to search. So every repeat has a bound.
"""

import re

OWN_STORAGE_LIMIT = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
UNHEALTHY_CHIPS = re.compile(r"healthy|unregistered device|devices unavailable")
NO_IMAGE = re.compile(
    r"code = NotFound|manifest unknown|name unknown|: not found\b|404 Not Found|no match for platform"
)
NO_ACCESS = re.compile(
    r"access denied|unauthorized|authorization failed|authentication required|401 Unauthorized|403 Forbidden"
    r"|PermissionDenied|signature validation failed",
    re.IGNORECASE,
)
NO_PROGRAM = re.compile(
    r"executable file .{0,300}not found"
    r"|exec:? .{0,300}(no such file or directory|permission denied|is a directory|format error)"
    r"|no command specified|chdir to cwd"
    # The working directory. Outside the container it would be one of the node's own.
    r"|container init: .{0,80}mkdir .{0,300}: (not a directory|permission denied|read-only file system)"
)
# What a node gets over by itself: its runtime is slow, its disk full, its caches are cold.
MAY_HEAL = re.compile(
    r"timed out|deadline exceeded|i/o timeout|is reserved for|unavailable|connection refused|transport is closing"
    r"|too many requests|no space left",
    re.IGNORECASE,
)
# The device's name and the kernel's error on one line, in either order. "Busy" alone may be a port or a file; and that
# "the TPU is already in use by process with pid 7" is libtpu's lock in the container's own /tmp: the user's process.
_CHIP = r"/dev/(?:vfio|accel)"
_BUSY = r"[Rr]esource busy"
_BROKEN = r"(?:[Nn]o such device|Input/output error|not a device node)"
CHIP_BUSY = re.compile(rf"{_CHIP}.{{0,80}}{_BUSY}|{_BUSY}.{{0,80}}{_CHIP}")
CHIP_BROKEN = re.compile(
    rf"{_CHIP}.{{0,80}}{_BROKEN}|{_BROKEN}.{{0,80}}{_CHIP}|stat {_CHIP}\S{{0,80}}: no such file"
    r"|TPU initialization failed: No \w{1,40} device found"
)
_DENIED = r"(?:[Pp]ermission denied|[Oo]peration not permitted)"
CHIP_DENIED = re.compile(rf"{_CHIP}.{{0,80}}{_DENIED}|{_DENIED}.{{0,80}}{_CHIP}")
# PyTorch's loader processes, and its files in /dev/shm.
SHARED_MEMORY_FULL = re.compile(
    r"insufficient shared memory|out of shared memory|DataLoader worker .{0,80}Bus error"
    r"|unable to allocate shared memory|</?torch_\S{1,80}>: No space left on device"
)
LOADER_LOST = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]{1,300}\) exited unexpectedly")
# "... and image will run as root", "... and image has non-numeric user (app), cannot verify user is non-root".
ROOT_IMAGE = re.compile(r"runAsNonRoot|breaks non-root policy")
