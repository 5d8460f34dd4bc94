"""examples/sweep.sh on this machine: the runs that it starts, and how it compares them."""

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpu_training_operator.cli.main import main

SWEEP = Path(__file__).parents[3] / "examples" / "sweep.sh"
JOB = SWEEP.with_name("digits.yaml")

# Stands in for `tpujob run`: notes its arguments, leaves a result, and ends as the rate says.
TPUJOB = """\
#!/bin/sh
echo "$@" >>calls
shift 5
mkdir -p "$1"
case $3 in
*=99) echo '{"state": "Failed", "metrics": {}}' >"$1/result.json"; exit 1 ;;
*=bad) exit 2 ;;
*) echo "{\\"state\\": \\"Succeeded\\", \\"metrics\\": {\\"loss\\": 0.5, \\"accuracy\\": ${3#*=}}}" >"$1/result.json" ;;
esac
"""


def sweep(directory: Path, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [SWEEP, command], cwd=directory, env={"PATH": path, "JOB": str(JOB), **environ}, capture_output=True, text=True
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tpujob = tmp_path / "tpujob"
    tpujob.write_text(TPUJOB)
    tpujob.chmod(0o755)
    return tmp_path


def test_each_rate_is_trained_with_each_seed_and_the_best_comes_first(here: Path) -> None:
    done = sweep(here, "run", RATES="0.1 99 0.3", SEEDS="0 1")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [(name, state) for name, state, *_ in rows] == [
        ("lr-0.3-seed-0", "Succeeded"),
        ("lr-0.3-seed-1", "Succeeded"),
        ("lr-0.1-seed-0", "Succeeded"),
        ("lr-0.1-seed-1", "Succeeded"),
        ("lr-99-seed-0", "Failed"),
        ("lr-99-seed-1", "Failed"),
    ]
    assert rows[0][2:] == ["loss", "0.5000", "accuracy", "0.3000"]
    assert len((here / "calls").read_text().splitlines()) == 6


def test_the_real_command_takes_what_the_sweep_passes_to_it(here: Path) -> None:
    sweep(here, "run", RATES="0.25", SEEDS="7")
    run, job, *options = (here / "calls").read_text().split()
    output = options.index("--output-dir")
    shown = CliRunner().invoke(main, ["plan", job, *options[:output], *options[output + 2 :], "-o", "json"])
    assert (run, shown.exit_code) == ("run", 0), shown.output
    assert '"learningRate": 0.25' in shown.stdout
    assert '"v5litepod-4"' in shown.stdout


def test_a_command_that_is_refused_ends_the_sweep(here: Path) -> None:
    done = sweep(here, "run", RATES="bad 0.1", SEEDS="0")
    assert (done.returncode != 0, len((here / "calls").read_text().splitlines())) == (True, 1)


def test_without_a_command_it_says_how_it_is_used(here: Path) -> None:
    done = sweep(here, "")
    assert (done.returncode, done.stderr) == (2, f"usage: {SWEEP} run | table | apply | get\n")
