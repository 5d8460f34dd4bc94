"""A whole run whose checkpoints are in a bucket, on a real server with the storage's interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import interrupted
from tests.trainer.checkpoint.conftest import BUCKET
from tests.trainer.checkpoint.refusing_server import answering
from tests.trainer.gang_processes import Launcher, run_spec
from tpu_contract.protocol import ExitCode


@pytest.mark.usefixtures("object_storage")
def test_a_gang_that_is_stopped_continues_from_the_bucket(launcher: Launcher) -> None:
    checkpoint = {"uri": f"gs://{BUCKET}/stopped", "everySteps": 3, "keep": 1}
    task = {"entrypoint": "tests.trainer.interrupted:task", "hosts": 2, "replicas": 2}
    whole = launcher.start(run_spec(**task))
    assert whole.wait() == [ExitCode.Succeeded] * 2, whole.output()
    stopped = launcher.start(run_spec(**task, checkpoint=checkpoint), **{interrupted.FAULT: "1:7:TERM"})
    assert stopped.wait() == [ExitCode.Preempted] * 2, stopped.output()
    rest = launcher.start(run_spec(**task, checkpoint=checkpoint))
    assert rest.wait() == [ExitCode.Succeeded] * 2, rest.output()
    assert stopped.losses() + rest.losses() == whole.losses()


@pytest.mark.parametrize("field", ["uri", "resumeFrom"])
def test_a_bucket_that_may_not_be_read_ends_the_run_before_its_first_step(
    launcher: Launcher, tmp_path: Path, field: str
) -> None:
    checkpoint = {"uri": str(tmp_path / "own"), "everySteps": 3, "keep": 1, field: "gs://of-others/run"}
    with answering(403, "trainer@p does not have storage.objects.list access") as address:
        storage = {"STORAGE_EMULATOR_HOST": f"http://{address}"}
        gang = launcher.start(run_spec(checkpoint=checkpoint), **storage)
        assert gang.wait() == [ExitCode.StorageDenied], gang.output()
    message = gang.hosts[0].message()["message"]
    assert message.startswith("gs://of-others/run: cannot")
    assert "Traceback" not in gang.hosts[0].output
