"""This trainer as a worker runs it: `python -m tpu_trainer` with a run spec, one host per replica, XLA's CPU device."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.trainer.models import LEARNING_RATE, MODELS, SEED


def run_spec(model: str, steps: int, hosts: int = 1, **more: Any) -> dict[str, Any]:
    """Returns the run spec of `model`; `more` adds fields (checkpoint, report)."""
    batch = MODELS[model].batch
    return {
        "schema": "runspec/v1",
        "job": {"namespace": "default", "name": f"bench-{model}", "uid": "bench", "attempt": 1},
        "entrypoint": f"bench.trainer.models:{model}",
        "backend": "xla",
        "hardware": "CPU",
        "slice": {"generation": "v5e", "topology": f"1x{hosts}", "slices": 1, "hosts": hosts, "replicas": hosts},
        "batch": {"global": batch, "perReplica": batch // hosts},
        "trainSteps": steps,
        "warmupSteps": 0,
        "seed": SEED,
        "optimizer": {"name": "adamw", "learningRate": str(LEARNING_RATE)},
        **more,
    }


def environments(spec: Mapping[str, Any], directory: Path) -> list[dict[str, str]]:
    """Returns the environment that the operator would set per host; run spec and report are in `directory`."""
    file = directory / "run.json"
    file.write_text(json.dumps(spec))
    hosts = spec["slice"]["hosts"]
    everyone = {
        "TPUJOB_RUN_SPEC": str(file),
        "TPUJOB_NUM_HOSTS": str(hosts),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    leader = {"TPUJOB_REPORT_DIRECTORY": str(directory)}
    return [
        {
            **everyone,
            **(leader if host == 0 else {}),
            "TPUJOB_HOST_INDEX": str(host),
            "TPUJOB_TERMINATION_LOG": str(directory / f"termination-{host}"),
        }
        for host in range(hosts)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
