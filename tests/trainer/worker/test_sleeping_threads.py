"""How torch's threads wait on a worker's host, as libgomp says it where it is loaded."""

from __future__ import annotations

import pytest

from tests.trainer.gang_processes import Launcher, run_spec


@pytest.mark.parametrize(
    ("environment", "spins"),
    [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
    ids=["unset", "the user's"],
)
def test_threads_on_an_xla_host_sleep_unless_the_environment_says_otherwise(
    launcher: Launcher, environment: dict[str, str], spins: str
) -> None:
    gang = launcher.start(run_spec(backend="xla"), real=True, OMP_DISPLAY_ENV="VERBOSE", **environment)
    # The rest of the imports is left out: the process is killed at the end of the test.
    gang.hosts[0].wait_for("GOMP_SPINCOUNT")
    assert f"GOMP_SPINCOUNT = '{spins}'" in gang.hosts[0].output
