"""Events as events.k8s.io/v1 accepts them, sent beside the passes."""

import asyncio

import pytest

from tests.fakes.cluster import FakeCluster
from tests.fakes.held_requests import settle
from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tpu_training_operator.api.conditions import EventReason
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.kube.cluster import EVENTS
from tpu_training_operator.kube.errors import Unavailable
from tpu_training_operator.runtime import events
from tpu_training_operator.runtime.events import EventSender, event_body


def test_an_event_in_full() -> None:
    body = event_body(Event(EventReason.RESTARTING, "attempt 2 starts now", warning=True), job_body(), NOON)
    assert body.pop("metadata")["namespace"] == "default"
    assert body.pop("reportingInstance")
    assert body == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "eventTime": "2026-01-15T12:00:00.000000Z",
        "reportingController": "tpu-training-operator",
        "action": "Reconcile",
        "reason": "Restarting",
        "type": "Warning",
        "note": "attempt 2 starts now",
        "regarding": {
            "apiVersion": "tpu-operator.dev/v1alpha1",
            "kind": "TPUTrainingJob",
            "namespace": "default",
            "name": "digits",
            "uid": job_body()["metadata"]["uid"],
        },
    }


def test_a_wanted_event_is_not_a_warning() -> None:
    assert event_body(Event(EventReason.SUCCEEDED, "done"), job_body(), NOON)["type"] == "Normal"


def test_no_two_events_share_a_name() -> None:
    names = {event_body(Event(EventReason.FAILED, "b"), job_body(), NOON)["metadata"]["name"] for _ in range(100)}
    assert len(names) == 100


def test_a_note_is_cut_at_1024_bytes_between_two_characters() -> None:
    note = event_body(Event(EventReason.FAILED, "x" + "é" * 1024), job_body(), NOON)["note"]
    assert len(note.encode()) == 1023
    assert note == "x" + "é" * 511


async def test_nobody_waits_for_events_and_too_many_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_WAITING", 3)
    cluster, is_open = FakeCluster(), asyncio.Event()
    cluster.hooks["create Event"] = is_open.wait
    cluster.fail_once("create Event", Unavailable(503, "", "not now"))
    sender = EventSender(cluster)
    for note in ("refused", "second", "last", "one too many"):
        sender.send([Event(EventReason.RUNNING, note)], job_body(), NOON)
    work = asyncio.create_task(sender.run())
    is_open.set()
    await settle()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert {event["note"] for event in await cluster.list(EVENTS, "default")} == {"second", "last"}
    assert cluster.count()["create Event"] == 3
