"""Limits of waits, and ports, on a machine that others use as well."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import deadlines, ports

GIVES_A_PORT = "import sys; from tests.cluster.ports import free_port; print(free_port(), flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("load", "seconds"), [(0.1, 10), (1, 10), (2.5, 25), (100, 60)])
def test_a_limit_grows_with_the_load_up_to_sixfold(
    monkeypatch: pytest.MonkeyPatch, load: float, seconds: float
) -> None:
    monkeypatch.setattr(deadlines, "load_per_core", lambda: load)
    assert deadlines.deadline(10) == seconds
    assert deadlines.kubectl_timeout(10) == f"--timeout={seconds}s"


def test_a_port_is_given_to_one_process() -> None:
    repository = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", GIVES_A_PORT], cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        port = int(other.stdout.readline())
        assert not ports._take(port)
        other.communicate()
    assert ports._take(port)
    ports._give_back(port)
