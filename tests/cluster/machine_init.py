"""The first process of a simulated machine. `machine` starts it in new pid, mount and network namespaces.

Run as a script, by path: `python -I -S machine_init.py FOLDER`. It mounts over the fixed paths where a node's programs
would write to this machine, creates FOLDER/ready, and then reaps orphaned processes.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

# Fixed paths of kubelet (device plugins, links to logs) and of the CNI library; /run holds containerd's state, whose
# sockets have fixed names too.
PRIVATE_FOLDERS = ("/var/lib/kubelet", "/var/log/containers", "/var/lib/cni")
FRESH_AT_EVERY_START = "/run"

# kubelet changes these where they differ, but they belong to the whole machine, so it is shown the values it wants.
KUBELET_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def main(folder: Path) -> None:
    _mount("--make-rshared", "/")
    for path in PRIVATE_FOLDERS:
        own = folder / path.strip("/").replace("/", ".")
        own.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(own), path)
    _mount("-t", "tmpfs", "-o", "mode=755", "run", FRESH_AT_EVERY_START)
    for name, value in KUBELET_SETTINGS.items():
        own = folder / name.replace("/", ".")
        own.write_text(f"{value}\n")
        _mount("--bind", str(own), f"/proc/sys/{name}")
    # This setting belongs to the network namespace, which is the simulated machine's own.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    (folder / "ready").touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        _collect_ended()
        signal.sigwait({signal.SIGCHLD})


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _collect_ended() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
