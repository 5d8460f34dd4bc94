"""Starts the hosts of a gang as processes on loopback that run `python -m tpu_trainer`, and always reaps them.

They are forked from a process that has imported torch or torch_xla (`fork_server`), unless a test asks for the real
command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ports import free_port
from tests.layers import STARTED_WITH
from tests.trainer import fork_server
from tests.trainer.recorded import Recorded, recorded

ROOT = Path(__file__).parents[2]
DEADLINE = 600.0
"""Seconds after which a test gives up on a process: several times what a gang needs to import torch on two loaded
cores. No test depends on how fast a process is."""


ON_XLAS_CPU = {
    "PJRT_DEVICE": "CPU",
    # Compiling takes most of a gang's time, and no test needs fast programs. With the last two it takes a third of what
    # it takes with the first two alone.
    "XLA_FLAGS": " ".join(
        (
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        )
    ),
}

ACCELERATE_ON_CPU = {"USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true"}
"""Accelerate and transformers would train on torch_xla, each process alone, where that is installed."""

ON_INDUCTOR = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Its test of the CPU's vector units takes every process a compilation and a start of Python.
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}


def run_spec(**changes: Any) -> dict[str, Any]:
    """A valid run spec of `tasks.small`; `hosts`, `replicas` and `optimizer` change in place, the rest on top."""
    hosts, replicas = changes.pop("hosts", 1), changes.pop("replicas", 8)
    name = changes.pop("optimizer", "sgd")
    recipe = {"name": name, "learningRate": {"sgd": "0.3", "adamw": "0.02"}.get(name, "0.1"), "weightDecay": "1e-4"}
    return {
        "schema": "runspec/v1",
        "job": {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 1},
        "entrypoint": "tests.trainer.tasks:small",
        "backend": "torch",
        "hardware": "CPU",
        "slice": {"generation": "v5e", "topology": "2x4", "slices": 1, "hosts": hosts, "replicas": replicas},
        "batch": {"global": 16, "perReplica": 16 // replicas},
        "trainSteps": 24,
        "warmupSteps": 5,
        "seed": 3,
        "optimizer": {**recipe, "momentum": "0.9"} if name == "sgd" else recipe,
        "parameters": {},
        **changes,
    }


Process = subprocess.Popen[str] | fork_server.ForkedProcess
"""In a session of its own: the processes per chip are its children and must not outlive it."""


def real_process(module: str, env: dict[str, str], python: str = sys.executable) -> Process:
    """The command that a worker pod runs."""
    return subprocess.Popen(
        [python, "-m", module],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Host:
    """One host's process. Its output is collected all the time, so that a full pipe never blocks it."""

    def __init__(self, process: Process, termination_log: Path) -> None:
        self.termination_log = termination_log
        self.process = process
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._collect)
        self._reader.start()

    @property
    def output(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def wait(self) -> int:
        try:
            code = self.process.wait(timeout=DEADLINE)
        except (TimeoutError, subprocess.TimeoutExpired):
            pytest.fail(f"the host has not ended after {DEADLINE:.0f} s:\n{self.output}")
        self._reader.join(timeout=DEADLINE)
        return code

    def wait_for(self, text: str) -> None:
        """Returns as soon as a line contains `text`; fails if the process ends without one."""
        with self._changed:
            self._changed.wait_for(lambda: any(text in line for line in self._lines) or self._ended, DEADLINE)
        assert text in self.output, self.output

    def message(self) -> dict[str, Any]:
        """The termination message."""
        return json.loads(self.termination_log.read_bytes())

    def reap(self) -> None:
        if self.process.poll() is None or self._reader.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    _ended = False

    def _collect(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass
class Gang:
    hosts: list[Host]
    reports: Path

    def wait(self) -> list[int]:
        return [host.wait() for host in self.hosts]

    def output(self) -> str:
        return "\n".join(f"--- host {i}\n{host.output}" for i, host in enumerate(self.hosts))

    def recorded(self) -> Recorded:
        return recorded(self.reports)

    def warnings(self) -> dict[str, list[str]]:
        """What host 0 was warned of, by check, in the order in which it came."""
        found: dict[str, list[str]] = {}
        for line in self.hosts[0].output.splitlines():
            if line.startswith("warning: "):
                _, check, message = line.split(": ", 2)
                found.setdefault(check, []).append(message)
        return found

    def losses(self) -> list[float]:
        """The global loss of every step, as host 0 recorded it."""
        return self.recorded().losses


class Launcher:
    """Hands out gangs and remembers their processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hosts: list[Host] = []

    def start(
        self,
        spec: dict[str, Any],
        module: str = "tpu_trainer",
        *,
        real: bool = False,
        ranked: bool = True,
        packages: tuple[str, ...] | None = None,
        python: str = sys.executable,
        **env: str,
    ) -> Gang:
        """One process per host of `spec`, with the environment the operator would give it, `env` on top.

        `real`: started by the real command, not forked. `packages`: imported before the fork, by default the backend's.
        `python`: another stack's, which has this project installed.
        A spec without an entrypoint is of a loop of the user's own, `module`, whose process has a rank, as of
        torchrun, unless `ranked` is False.
        """
        packages = packages or (fork_server.XLA if spec["backend"].startswith("xla") else fork_server.TORCH)
        directory = self._directory / f"gang-{len(self._hosts)}"
        directory.mkdir()
        (directory / "run.json").write_text(json.dumps(spec))
        hosts, port = spec["slice"]["hosts"], free_port()
        gang = Gang([], directory / "reports")
        for index in range(hosts):
            log = directory / f"termination-{index}"
            worker = {
                **self.base(),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TPUJOB_RUN_SPEC": str(directory / "run.json"),
                "TPUJOB_NUM_HOSTS": str(hosts),
                "TPUJOB_HOST_INDEX": str(index),
                "TPUJOB_TERMINATION_LOG": str(log),
                **(ON_XLAS_CPU if "torch_xla" in packages else {}),
                **({} if "entrypoint" in spec or not ranked else _rank(index, hosts)),
                **({"TPUJOB_REPORT_DIRECTORY": str(gang.reports)} if index == 0 else {}),
                **({} if real else {fork_server.FORKS_REPLICAS: "1"}),
                **env,
            }
            if real:
                process: Process = real_process(module, worker, python)
            else:
                process = fork_server.start(packages, module, worker, str(ROOT), python)
            host = Host(process, log)
            self._hosts.append(host)
            gang.hosts.append(host)
        return gang

    def run_on_xla(self, module: str) -> str:
        """What a module of the tests prints that has XLA's CPU device for itself: PJRT starts once per process."""
        return self.run_alone(module, fork_server.XLA, **ON_XLAS_CPU)

    def run_alone(self, module: str, packages: tuple[str, ...] = fork_server.TORCH, **more: str) -> str:
        """What a module of the tests prints that needs a process of its own. `more`: variables."""
        env = {**self.base(), **more}
        host = Host(fork_server.start(packages, module, env, str(ROOT)), self._directory / "termination")
        self._hosts.append(host)
        assert host.wait() == 0, host.output
        return host.output

    def reap(self) -> None:
        for host in self._hosts:
            host.reap()

    def base(self) -> dict[str, str]:
        """What the test run was started with, and the tests' storage. Not what this process's own imports and runs have
        left in its environment: only processes that find the same there are forked from one server."""
        kept = {name: value for name, value in STARTED_WITH.items() if not name.startswith(("TPUJOB_", "PJRT_"))}
        storage = {name: os.environ[name] for name in ("STORAGE_EMULATOR_HOST",) if name in os.environ}
        return {
            **kept,
            **storage,
            "PYTHONPATH": f"{ROOT / 'trainer_image'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            **ACCELERATE_ON_CPU,
            # No test has a TPU, and to import TorchTPU takes ten seconds. On a CPU the trainer sets this itself.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }


def _rank(index: int, hosts: int) -> dict[str, str]:
    """What torchrun tells its processes. Lightning recognises it by the run's id."""
    return {
        "RANK": str(index),
        "GROUP_RANK": str(index),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }


KINDS = ("torch", "xla", "chips", "xla-spmd")
"""The ways replicas can run: a process each (torch, xla), a thread each in place of a TPU chip's process (chips), or a
device each of one program (xla-spmd)."""


TWO_PER_HOST = {"device": "cpu", "collectives": "gloo", "processesPerHost": 2}
"""`torch` of a run spec whose hosts have two processes."""


def start_replicas(launcher: Launcher, kind: str, replicas: int, **changes: Any) -> Gang:
    """`replicas` replicas of one of KINDS; for `changes` see `run_spec`."""
    if kind == "chips":
        spec = run_spec(backend="xla", hardware="TPU", replicas=replicas, **changes)
        return launcher.start(spec, module="tests.trainer.chip_replicas", **chips(replicas))
    hosts = 1 if kind == "xla-spmd" else replicas
    return launcher.start(run_spec(backend=kind, hosts=hosts, replicas=replicas, **changes))


def chips(replicas: int) -> dict[str, str]:
    """Variables that make XLA's CPU device stand in for `replicas` chips of a host.

    Without the first two, replicas that wait in a collective take the threads that the others need.
    """
    return {
        "PJRT_CPU_ASYNC_CLIENT": "0",
        "XLA_THREAD_POOL_SIZE": str(4 * replicas),
        "CPU_NUM_DEVICES": str(replicas),
    }
