"""The reporter in docs/progress.md, run as it stands there against a service on loopback."""

import asyncio
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ports import free_port
from tests.unit.progress_desk import KEY, PROGRESS, Desk
from tpu_training_operator.runtime.progress.pki import ServiceName, new_authority, server_tls
from tpu_training_operator.runtime.progress.server import serve

PAGE = Path(__file__).parents[3] / "docs" / "progress.md"


@pytest.fixture
def reporter() -> dict[str, Any]:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


async def test_the_reporter_of_the_documentation_reports(
    reporter: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, port, desk = datetime.now(UTC), free_port(), Desk()
    authority = new_authority("progress", now)
    (tmp_path / "ca.crt").write_bytes(authority.pem.certificate)
    (tmp_path / "token").write_text("token\n")
    monkeypatch.setenv("TPUJOB_PROGRESS_URL", f"https://localhost:{port}{PROGRESS}")
    monkeypatch.setenv("TPUJOB_PROGRESS_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("TPUJOB_PROGRESS_CA_FILE", str(tmp_path / "ca.crt"))
    names = ServiceName("operator", "tpu-system").dns_names
    async with server_tls(authority, names, lambda: now) as tls, serve(desk.service, port, tls):
        assert await asyncio.to_thread(reporter["report"], 7, loss=0.25) is False
        desk.inboxes.ask_for_stacks(KEY)
        assert await asyncio.to_thread(reporter["report"], 7) is True
        assert await asyncio.to_thread(reporter["report"], 7, stacks="Thread 1: ...") is False
        (tmp_path / "token").write_text("garbage")
        assert await asyncio.to_thread(reporter["report"], 8) is False
    report = desk.inbox.report
    assert (report.step, report.stacks) == (7, "Thread 1: ...")
    assert "HTTP Error 401" in capsys.readouterr().out


async def test_without_a_service_the_reporter_does_nothing(
    reporter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPUJOB_PROGRESS_URL", raising=False)
    assert reporter["report"](7) is False
