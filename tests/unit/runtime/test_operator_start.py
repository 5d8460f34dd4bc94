"""The operator as a process, before any API server has answered."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.api import answers_ok
from tests.cluster.deadlines import deadline
from tests.cluster.ports import free_port
from tests.cluster.processes import wait_until
from tests.fakes.watched_cluster import kubeconfig_for
from tpu_training_operator.runtime.ports import listening_socket


@pytest.mark.parametrize("port", ["health", "metrics"])
def test_a_taken_port_ends_the_process_with_one_line_about_it(tmp_path: Path, port: str) -> None:
    config = kubeconfig_for(f"http://127.0.0.1:{free_port()}", tmp_path / "config")
    ports = {"health": free_port(), "metrics": free_port()}
    with listening_socket(None, ports[port]):
        ended = subprocess.run(
            [sys.executable, "-m", "tpu_training_operator", *(f"--{name}-port={at}" for name, at in ports.items())],
            env=os.environ | {"KUBECONFIG": str(config)},
            capture_output=True,
            text=True,
            timeout=deadline(60),
        )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert str(ports[port]) in line


def test_without_an_api_server_the_process_is_alive_and_stops_when_it_is_told_to(tmp_path: Path) -> None:
    health = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tpu_training_operator", f"--health-port={health}"],
        env=os.environ | {"KUBECONFIG": str(kubeconfig_for(f"http://127.0.0.1:{free_port()}", tmp_path / "config"))},
    )
    try:
        wait_until(lambda: answers_ok(f"http://127.0.0.1:{health}/healthz"), timeout=60, what="it is alive")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=deadline(60)) == 0
    finally:
        process.kill()
        process.wait()
