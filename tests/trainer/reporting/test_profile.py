"""A profiler trace beside the report: which steps it has, its files, and what happens where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import in_process
from tests.trainer.gang_processes import Launcher, run_spec


def ran(tmp_path: Path, **changes: Any) -> in_process.Run:
    return in_process.run(run_spec(replicas=1, report={"profile": {"steps": 5}}, **changes), tmp_path)


def test_the_steps_after_the_warm_ones_are_captured_once(tmp_path: Path) -> None:
    run = ran(tmp_path)
    (trace,) = (tmp_path / "reports").glob("*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == 5
    history = json.loads((tmp_path / "reports" / "history.json").read_text())
    assert history["environment"]["Profile"] == f"steps 4 to 8: {trace.name}"
    assert run.warnings == []
    assert run.losses == in_process.run(run_spec(replicas=1), tmp_path / "other").losses


def test_a_run_that_continues_is_captured_after_its_own_first_steps(tmp_path: Path) -> None:
    place = {"checkpoint": {"uri": str(tmp_path / "checkpoints"), "keep": 1}}
    in_process.run(run_spec(replicas=1, endAfterSteps=10, **place), tmp_path)
    ran(tmp_path, **place)
    history = json.loads((tmp_path / "reports" / "history.json").read_text())
    assert history["environment"]["Profile"].startswith("steps 14 to 18: ")


def test_a_run_that_ends_within_the_capture_keeps_what_there_is(tmp_path: Path) -> None:
    ran(tmp_path, endAfterSteps=6)
    history = json.loads((tmp_path / "reports" / "history.json").read_text())
    assert history["environment"]["Profile"].startswith("steps 4 to 6: ")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"endAfterSteps": 3}, "the run ended before step 4"), ({"raises": True}, "RuntimeError: no profiler here")],
)
def test_a_capture_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no profiler here")

    if changes.pop("raises", False):
        monkeypatch.setattr("tpu_trainer.reporting.profile._TorchCapture.start", fails)
    run = ran(tmp_path, **changes)
    assert any(f"no profile was captured: {why}" in warning for warning in run.warnings)
    assert not [*(tmp_path / "reports").glob("*.json.gz"), *(tmp_path / "reports").glob("*.pt.trace.json")]


def test_on_xla_tensorboards_profile_plugin_finds_an_xplane(launcher: Launcher, tmp_path: Path) -> None:
    report = {"profile": {"steps": 5}, "uri": str(tmp_path / "report")}
    gang = launcher.start(run_spec(backend="xla", replicas=1, report=report))
    assert gang.wait() == [0], gang.output()
    (plane,) = (tmp_path / "report").glob("plugins/profile/*/*.xplane.pb")
    content = plane.read_bytes()
    assert b"/host:CPU" in content
    assert "profiled steps 4 to 8" in gang.output()
