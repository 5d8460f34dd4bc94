"""examples/sweep.sh in a cluster: what it creates, as a real API server accepts it, and how it is compared."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cluster import binaries
from tests.cluster.control_plane import ControlPlane
from tests.controlplane.jobs import Namespace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, namespace: str) -> Namespace:
    return Namespace(control_plane, namespace)


@pytest.fixture
def shell(space: Namespace, tmp_path: Path) -> dict[str, str]:
    """An environment with a kubectl whose current context is the test's own."""
    real = binaries.ensure("kubectl")["kubectl"]
    context = [f"--kubeconfig={space.cluster.kubeconfig}", f"--namespace={space.name}"]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {shlex.join([str(real), *context])} "$@"\n')
    kubectl.chmod(0o755)
    # kubectl caches what it learns of the API below HOME.
    return {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}", "HOME": str(tmp_path)}


def sweep(command: str, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [ROOT / "examples" / "sweep.sh", command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sweep_is_one_job_for_each_rate_and_seed_and_one_table(space: Namespace, shell: dict[str, str]) -> None:
    sweep("apply", shell | {"RATES": "0.02 1e-3", "SEEDS": "0 7"})
    rows = [line.split() for line in sweep("get", shell).splitlines()]
    assert rows == [
        ["NAME", "STATE", "RATE", "SEED", "LOSS", "ACCURACY"],
        ["digits-lr-0-02-seed-0", "<none>", "0.02", "0", "<none>", "<none>"],
        ["digits-lr-0-02-seed-7", "<none>", "0.02", "7", "<none>", "<none>"],
        ["digits-lr-1e-3-seed-0", "<none>", "0.001", "0", "<none>", "<none>"],
        ["digits-lr-1e-3-seed-7", "<none>", "0.001", "7", "<none>", "<none>"],
    ]
    job = space.job("digits-lr-1e-3-seed-7")
    assert job["metadata"]["labels"] == {"sweep": "digits"}
    assert job["spec"]["recipe"]["optimizer"]["momentum"] == 0.9
