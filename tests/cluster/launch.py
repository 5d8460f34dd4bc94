"""Becomes another program, which dies when the process that started it dies, for whatever reason.

Run as a script, by path, by `processes` and `binaries`: `python -I -S launch.py PARENT_PID PROGRAM ARG...`.
A program of its own and not a `preexec_fn`, because running Python between fork and exec can deadlock in a
process with threads, which a test process is. The pid stays the same: exec replaces this program in place.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; the setting survives execve(2) of a program that is not set-user-id


def main(arguments: list[str]) -> None:
    parent, program = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "prctl(PR_SET_PDEATHSIG)")
    # A parent that died before prctl sends no signal; only the changed parent pid tells.
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that asked for {program[0]} is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
