"""Whole runs of jobs that know of each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.gang_processes import Gang, Launcher, run_spec
from tpu_contract.protocol import ExitCode


def start(launcher: Launcher, name: str, directory: Path, uid: str = "", hosts: int = 1, **changes: Any) -> Gang:
    """Job `name`, whose checkpoints are below `directory`."""
    checkpoint = {"uri": f"{directory}/default/{name}", "keep": 1, **changes.pop("checkpoint", {})}
    job = {"namespace": "default", "name": name, "uid": uid or f"uid-of-{name}", "attempt": 1}
    return launcher.start(run_spec(job=job, hosts=hosts, checkpoint=checkpoint, **changes))


def test_a_job_continues_another_jobs_training_only_if_told_to(launcher: Launcher, tmp_path: Path) -> None:
    first = start(launcher, "first", tmp_path)
    assert first.wait() == [ExitCode.Succeeded], first.output()

    told = {"resumeFrom": f"{tmp_path}/default/first/"}
    longer = start(launcher, "longer", tmp_path, hosts=2, trainSteps=30, checkpoint=told)
    untold = start(launcher, "untold", tmp_path)
    again = start(launcher, "first", tmp_path, uid="created-again")
    idle = start(launcher, "idle", tmp_path, checkpoint=told)

    assert longer.wait() == [ExitCode.Succeeded] * 2, longer.output()
    assert len(longer.losses()) == 6
    assert "attempt 1, with step 25 of 30" in longer.hosts[0].output

    assert untold.wait() == [ExitCode.Succeeded], untold.output()
    assert untold.losses() == first.losses()

    assert again.wait() == [ExitCode.Succeeded], again.output()
    done = (
        "nothing left to train: checkpoint step-00000024-uidoffir-1 of job default/first, attempt 1 is at step 24 of 24"
    )
    assert again.hosts[0].message()["message"].startswith(done)
    assert [*again.warnings().values()] == [[done]]
    assert "trained" not in again.output()

    assert idle.wait() == [ExitCode.UserError], idle.output()
    assert idle.hosts[0].message()["message"].startswith(f"checkpoint.resumeFrom: {done}; raise recipe.trainSteps")
