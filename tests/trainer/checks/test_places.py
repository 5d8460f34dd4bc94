"""Where the buckets of a job are: what the storage answers, and what keeps it from an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.object_storage import ObjectStorage
from tests.cluster.ports import free_port
from tests.trainer.checkpoint.refusing_server import answering
from tests.trainer.checks.test_entry_check import check
from tests.trainer.gang_processes import run_spec
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.checks.entry.places import find_places
from tpu_trainer.contract.outcome import termination_message


def asked(server: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[dict[str, Any]]:
    """What is known of the job's buckets."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    found = find_places(parse_run_spec(run_spec(**{"dataUri": "gs://data/train", **changes})))
    return list(found["buckets"])


def test_a_real_server_tells_the_location_of_each_bucket_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"uri": "gs://kept/jobs", "keep": 3, "resumeFrom": "gs://data/other"}
    with ObjectStorage(tmp_path, location="EUROPE-WEST4") as storage:
        for name in ("data", "kept"):
            storage.make_bucket(name)
        found = asked(storage.url, monkeypatch, checkpoint=checkpoint)
        assert found == [{"name": "data", "location": "europe-west4"}, {"name": "kept", "location": "europe-west4"}]
        (missing,) = asked(storage.url, monkeypatch, dataUri="gs://nowhere/train")
        assert missing["trouble"] == "missing"


@pytest.mark.parametrize(
    ("status", "trouble"),
    [(401, "identity"), (403, "denied"), (404, "missing"), (429, "unavailable"), (503, "unavailable")],
)
def test_a_refusal_says_of_which_kind_it_is(status: int, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(status, "no") as address:
        (found,) = asked(f"http://{address}", monkeypatch)
    assert (found["name"], found["trouble"]) == ("data", trouble)
    assert str(status) in found["said"]


def test_a_server_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = asked(f"http://127.0.0.1:{free_port()}", monkeypatch)
    assert found["trouble"] == "unavailable"


def test_an_answer_without_a_location_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, "surprise") as address:
        (found,) = asked(f"http://{address}", monkeypatch)
    assert found["trouble"] == "unavailable"


def test_a_job_without_buckets_asks_nobody() -> None:
    assert find_places(parse_run_spec(run_spec(dataUri="/data/train"))) == {}


def test_the_check_leaves_it_in_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(403, "no") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        outcome = check(tmp_path, "tasks:small", checkpoint={"uri": "gs://kept/jobs", "keep": 3})
    assert outcome.code is ExitCode.Succeeded, outcome.message
    said = json.loads(termination_message(outcome))
    assert said["places"]["buckets"][0] | {"said": ""} == {"name": "kept", "trouble": "denied", "said": ""}
