"""The operator as a process, before any API server has answered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.ports import free_port
from tpu_training_operator.runtime.ports import listening_socket


@pytest.mark.parametrize("port", ["health", "metrics"])
def test_a_taken_port_ends_the_process_with_one_line_about_it(tmp_path: Path, port: str) -> None:
    absent = {"name": "absent", "cluster": {"server": f"http://127.0.0.1:{free_port()}"}}
    context = {"name": "absent", "context": {"cluster": "absent", "user": "nobody"}}
    user = {"name": "nobody", "user": {"token": "token"}}
    config = {"clusters": [absent], "users": [user], "contexts": [context], "current-context": "absent"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    ports = {"health": free_port(), "metrics": free_port()}
    with listening_socket(None, ports[port]):
        ended = subprocess.run(
            [sys.executable, "-m", "tpu_training_operator", *(f"--{name}-port={at}" for name, at in ports.items())],
            env=os.environ | {"KUBECONFIG": str(tmp_path / "config")},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert str(ports[port]) in line
