"""Hugging Face's Kubeflow callback reports to the operator when it gets the variables of worker 0."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cluster.ports import free_port
from tests.unit.progress_desk import TRAINER_STATUS, Desk
from tests.unit.reviewing_cluster import RESOLVED, begun_job
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.runtime.progress.pki import ServiceName, new_authority, server_tls
from tpu_training_operator.runtime.progress.server import serve


async def test_hugging_faces_callback_reports_from_the_first_step_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here, because every run that collects this file would wait seconds for the import.
    from transformers import TrainerControl, TrainerState
    from transformers.integrations.integration_utils import KubeflowCallback

    now, port, desk = datetime.now(UTC), free_port(), Desk()
    authority = new_authority("progress", now)
    (tmp_path / "ca.crt").write_bytes(authority.pem.certificate)
    (tmp_path / "token").write_text("token\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{port}{TRAINER_STATUS}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    # It waits five seconds between reports.
    monkeypatch.setattr(KubeflowCallback, "_MIN_UPDATE_INTERVAL", 0.0)
    desk.cluster.put(begun_job({"status.resolved": RESOLVED}))
    callback, control = KubeflowCallback(), TrainerControl()
    state = TrainerState(max_steps=300, is_world_process_zero=True)

    async def after(call: str, **more: object) -> tuple[ReportPhase, int, int | None, str | None]:
        await asyncio.to_thread(getattr(callback, call), None, state, control, **more)
        report = desk.inbox.report
        return report.phase, report.step, report.total_steps, report.loss

    names = ServiceName("operator", "tpu-system").dns_names
    async with server_tls(authority, names, lambda: now) as tls, serve(desk.service, port, tls):
        assert await after("on_train_begin") == (ReportPhase.STARTING, 0, 300, None)
        state.global_step = 61
        await after("on_log", logs={"loss": 0.25, "learning_rate": 5e-05})
        assert await after("on_step_end") == (ReportPhase.TRAINING, 61, 300, "0.25")
        # Its last report has no step, only a percentage.
        assert await after("on_train_end") == (ReportPhase.DONE, 300, 300, "0.25")
