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
    # The task need not be there: torch is imported before it.
    spec = run_spec(backend="xla", entrypoint="tests.trainer.nowhere:task")
    gang = launcher.start(spec, real=True, OMP_DISPLAY_ENV="VERBOSE", **environment)
    gang.hosts[0].wait()
    assert f"GOMP_SPINCOUNT = '{spins}'" in gang.hosts[0].output
