"""Runs a program inside a simulated machine and represents it outside: signals go in, the exit code comes out.

Run as a script, by path, by `machine`: `python -I -S machine_enter.py PID PROGRAM ARG...`, PID being the machine's
first process. The program is a child and not this process itself, because a pid namespace is entered by children only.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The mount namespace comes last: the paths of the others exist only in the namespace that is left.
NAMESPACES = ("pid", "net", "mnt")


def main(machine: int, program: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    for handle in [os.open(f"/proc/{machine}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]:
        _checked(libc.setns(handle, 0), "setns")
        os.close(handle)
    # Blocked until the child's pid is known; a pending signal is then passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execv(program[0], program)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the machine was killed, and the program with it
        os.kill(child, signal.SIGTERM)


def _checked(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), call)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
