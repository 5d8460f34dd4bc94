"""The programs of this machine that real nodes and image builds run, and the Debian packages that hold them.

`python -m tests.cluster.packages` prints the packages for apt-get. This module uses the standard library only, because
it runs before the project's environment exists.
"""

import os
import shutil
import sys
from pathlib import Path

# program -> package of Debian 12 and Ubuntu. Programs of util-linux (unshare, nsenter, mount) are always there.
PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "openssl": "openssl",
}
CNI_PACKAGE = "containernetworking-plugins"
# Where Debian's package and the project's own releases install the plugins.
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))

# Folders that Debian leaves out of the PATH of ordinary users and services.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MachineUnfit(Exception):
    """Real nodes cannot run here; the message says what is missing and what to install."""


def find(program: str) -> Path:
    """Absolute path of one of PROGRAMS. Raises MachineUnfit."""
    path = shutil.which(program, path=PATH)
    if path is None:
        raise MachineUnfit(f"no `{program}` on this machine; install the package {PROGRAMS[program]}")
    return Path(path)


def cni_folder() -> Path:
    """Where the CNI plugins are. Raises MachineUnfit."""
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    raise MachineUnfit(f"no CNI plugins in {' or '.join(map(str, CNI_FOLDERS))}; install the package {CNI_PACKAGE}")


def missing() -> str | None:
    """A message that says what keeps this machine from running real nodes, or None."""
    if sys.platform != "linux":
        return "real nodes need Linux"
    if os.geteuid() != 0:
        return "real nodes need root (namespaces, mounts, cgroups)"
    absent = {package for program, package in PROGRAMS.items() if shutil.which(program, path=PATH) is None}
    if not any((folder / "bridge").exists() for folder in CNI_FOLDERS):
        absent.add(CNI_PACKAGE)
    return f"packages missing for real nodes: {' '.join(sorted(absent))}" if absent else None


def require() -> None:
    """Raises MachineUnfit when real nodes cannot run here."""
    reason = missing()
    if reason is not None:
        raise MachineUnfit(reason)


if __name__ == "__main__":
    print(" ".join(sorted({*PROGRAMS.values(), CNI_PACKAGE})))
