"""The layers of tests, cheapest first: what each proves and what it needs."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cluster, packages


def _nothing() -> str | None:
    return None


SECOND_STACK = Path(__file__).parents[1] / ".venv-tpu/bin/python"
"""The Python that has TorchTPU and its torch, and no torch_xla."""

STARTED_WITH = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The environment of the test run, but for what `tests/conftest.py` undoes. Importing torch_xla changes a process's
own: it silences TorchTPU's log, for one."""

ON_THE_SECOND_STACK = "TEST_ON_THE_SECOND_STACK"
"""Set for a run of tests by `SECOND_STACK`."""


def _torch_xla() -> str | None:
    needed = ("torch", "sklearn") if os.environ.get(ON_THE_SECOND_STACK) else ("torch", "torch_xla", "sklearn")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed (torch_xla exists for Linux only)" if missing else None


def _both_stacks() -> str | None:
    own = None if SECOND_STACK.with_name("pytest").exists() else "no .venv-tpu; scripts/setup torch_tpu makes it"
    return _torch_xla() or own


def _tpu_compiler() -> str | None:
    missing = [name for name in ("jax", "jaxlib", "libtpu") if importlib.util.find_spec(name) is None]
    compiler = f"{', '.join(missing)} not installed (for Linux on x86-64, Python 3.11 and 3.12)" if missing else None
    return _torch_xla() or compiler


def _control_plane() -> str | None:
    if sys.platform != "linux":
        return "the test cluster needs Linux"
    missing = [tool for tool in ("go", "openssl") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} on PATH, to build and run Kubernetes with" if missing else None


def _real_nodes() -> str | None:
    own_nodes = None if os.environ.get(cluster.KUBECONFIG_SETTING) else packages.missing()
    return _torch_xla() or _control_plane() or own_nodes


@dataclass(frozen=True)
class Layer:
    """`tests/<name>/`. `missing` says what this machine lacks, or None. `has_cluster`: its tests share a cluster."""

    name: str
    proves: str
    missing: Callable[[], str | None] = _nothing
    has_cluster: bool = False


LAYERS = (
    Layer("unit", "single pieces, tables and properties"),
    Layer("planner", "the planner under every order of events"),
    Layer("contract", "operator and trainer mean the same", _torch_xla),
    Layer("local", "jobs as processes on this machine", _torch_xla),
    Layer("trainer", "equal trajectories over hosts and backends", _torch_xla),
    Layer("stacks", "the trainer on torch_xla and on TorchTPU's torch means the same", _both_stacks),
    Layer("aot", "what the TPU's compiler makes of a step", _tpu_compiler),
    Layer("cluster", "the test clusters themselves", _control_plane, has_cluster=True),
    Layer("controlplane", "a real API server, controllers and scheduler", _control_plane, has_cluster=True),
    Layer("chart", "the chart, as helm renders it and an API server takes it", _control_plane, has_cluster=True),
    Layer("e2e", "training on real nodes, installed with the chart", _real_nodes, has_cluster=True),
)
