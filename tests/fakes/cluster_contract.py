"""What the reconciler requires of a cluster, as tests for both an API server and local mode's store.

A test module inherits `ClusterContract` and provides the fixtures `cluster` (a kube.cluster.Cluster) and `namespace`
(an existing one that only this test uses).
"""

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.contract.jobs import job_body
from tests.fakes.objects import (
    config_map,
    delete,
    elsewhere,
    endpoint_slice,
    eventually,
    is_gone,
    owned_by,
    pod,
    version,
    with_status,
)
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.cluster_state.pod_events import explain_wait
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.kube.cluster import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    EVENTS,
    JOBS,
    PODS,
    Cluster,
    Object,
    Resource,
)
from tpu_training_operator.kube.errors import AlreadyExists, Conflict, InvalidRequest, NotFound
from tpu_training_operator.runtime.events import event_body

ANOTHER_UID = "11111111-2222-3333-4444-555555555555"

INVALID_JOBS: dict[str, tuple[Mapping[str, Any], str]] = {
    "no such slice": ({"slice.acceleratorType": "v5litepod-12"}, "spec.slice.acceleratorType"),
    "no such topology": ({"slice": {"generation": "v5e", "topology": "3x3"}}, "spec.slice.topology"),
    "no such generation": ({"slice": {"generation": "v9", "topology": "4x4"}}, "spec.slice.generation"),
    "two names for the slice": ({"slice.generation": "v5e", "slice.topology": "4x4"}, "spec.slice"),
    "v2 on GKE": ({"slice.acceleratorType": "v2-8"}, "spec.slice.hardware"),
    "no slices": ({"slice.count": 0}, "spec.slice.count"),
    "torch on TPU": ({"trainer.backend": "Torch"}, "spec.trainer"),
    "nothing to run": ({"trainer.entrypoint": ...}, "spec.trainer"),
    "no module:callable": ({"trainer.entrypoint": "examples.digits"}, "spec.trainer.entrypoint"),
    "a reserved variable": ({"trainer.env": [{"name": "PJRT_DEVICE", "value": "GPU"}]}, "spec.trainer.env"),
    "no recipe": ({"recipe": ...}, "spec.recipe"),
    "steps and epochs": ({"recipe.epochs": 3, "recipe.datasetSize": 1000}, "spec.recipe"),
    "epochs of unknown size": ({"recipe.trainSteps": ..., "recipe.epochs": 3}, "spec.recipe.datasetSize"),
    "a batch as text": ({"recipe.globalBatchSize": "128"}, "spec.recipe.globalBatchSize"),
    "a learning rate of 0": ({"recipe.optimizer.learningRate": "0"}, "spec.recipe.optimizer.learningRate"),
    "suspend as text": ({"runPolicy.suspend": "yes"}, "spec.runPolicy.suspend"),
}


class CreationContract:
    async def test_create_gives_the_object_its_identity(self, cluster: Cluster, namespace: str) -> None:
        metadata = (await cluster.create(job_body(namespace=namespace)))["metadata"]
        assert uuid.UUID(metadata["uid"])
        assert metadata["resourceVersion"]
        assert metadata["generation"] == 1
        assert metadata["creationTimestamp"].endswith("Z")

    async def test_create_returns_what_get_reads(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        assert await cluster.get(JOBS, namespace, "digits") == created

    async def test_create_drops_a_given_status(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(with_status(job_body(namespace=namespace), state="Running", attempt=3))
        # What the definition gives a new job instead is not what was sent.
        status = Status.read(created.get("status"))
        assert (status.state, status.attempt) == (None, 0)

    async def test_a_created_pod_is_pending(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(with_status(pod(namespace, "worker"), phase="Running"))
        assert created["status"]["phase"] == "Pending"

    async def test_a_name_can_be_used_only_once(self, cluster: Cluster, namespace: str) -> None:
        first = await cluster.create(job_body(namespace=namespace))
        with pytest.raises(AlreadyExists, match="digits"):
            await cluster.create(job_body({"recipe.seed": 2}, namespace=namespace))
        assert await cluster.get(JOBS, namespace, "digits") == first

    async def test_a_name_belongs_to_one_kind_and_one_namespace(self, cluster: Cluster, namespace: str) -> None:
        async with elsewhere(cluster) as other:
            name = other["metadata"]["name"]
            await cluster.create(config_map(namespace, name))
            await cluster.create(job_body(name=name, namespace=namespace))

    async def test_a_freed_name_gets_another_uid(self, cluster: Cluster, namespace: str) -> None:
        first = await cluster.create(config_map(namespace, "data"))
        await delete(cluster, first)
        second = await cluster.create(config_map(namespace, "data"))
        assert second["metadata"]["uid"] != first["metadata"]["uid"]

    async def test_unknown_fields_are_kept(self, cluster: Cluster, namespace: str) -> None:
        worker = pod(namespace, "worker", annotations={"example.com/note": "kept"})
        worker["spec"] |= {"schedulingGates": [{"name": "example.com/gate"}], "setHostnameAsFQDN": True}
        created = await cluster.create(worker)
        read = await cluster.get(PODS, namespace, "worker")
        for stored in (created, read):
            assert stored["metadata"]["annotations"] == {"example.com/note": "kept"}
            assert stored["spec"]["schedulingGates"] == [{"name": "example.com/gate"}]
            assert stored["spec"]["setHostnameAsFQDN"] is True

    @pytest.mark.parametrize(("changes", "field"), INVALID_JOBS.values(), ids=INVALID_JOBS.keys())
    async def test_an_invalid_job_is_refused_with_the_fields_path(
        self, cluster: Cluster, namespace: str, changes: Mapping[str, Any], field: str
    ) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            await cluster.create(job_body(changes, namespace=namespace))
        assert f"{field}: " in str(refusal.value)
        with pytest.raises(NotFound):
            await cluster.get(JOBS, namespace, "digits")

    async def test_a_job_name_that_cannot_be_a_host_name_is_refused(self, cluster: Cluster, namespace: str) -> None:
        with pytest.raises(InvalidRequest, match=r"metadata\.name must be at most 48 characters"):
            await cluster.create(job_body(name="d" * 49, namespace=namespace))


class ReadingContract:
    @pytest.mark.parametrize("resource", [JOBS, PODS, CONFIG_MAPS], ids=lambda resource: resource.plural)
    async def test_a_missing_object_is_not_found(self, cluster: Cluster, namespace: str, resource: Resource) -> None:
        with pytest.raises(NotFound, match="absent"):
            await cluster.get(resource, namespace, "absent")

    async def test_a_list_without_matches_is_empty(self, cluster: Cluster, namespace: str) -> None:
        assert await cluster.list(JOBS, namespace) == []

    async def test_a_list_holds_the_objects_with_all_the_labels(self, cluster: Cluster, namespace: str) -> None:
        for name, labels in {
            "both": {"job": "digits", "attempt": "1"},
            "other-value": {"job": "digits", "attempt": "2"},
            "one-label": {"job": "digits"},
            "none": None,
        }.items():
            await cluster.create(config_map(namespace, name, **({"labels": labels} if labels else {})))

        async def names(labels: Mapping[str, str] | None) -> set[str]:
            found = await cluster.list(CONFIG_MAPS, namespace, labels)
            # An API server puts its own ConfigMap into every namespace.
            return {item["metadata"]["name"] for item in found} - {"kube-root-ca.crt"}

        assert await names({"job": "digits", "attempt": "1"}) == {"both"}
        assert await names({"job": "digits"}) == {"both", "other-value", "one-label"}
        assert await names({"job": "letters"}) == set()
        assert await names(None) == {"both", "other-value", "one-label", "none"}

    async def test_a_list_of_events_covers_one_pod(self, cluster: Cluster, namespace: str) -> None:
        for uid in ("uid-1", "uid-1", "uid-2"):
            regarding = {"kind": "Pod", "name": "digits-1-0-0", "namespace": namespace, "uid": uid}
            job = {"metadata": {"name": "digits", "namespace": namespace, "uid": uid}}
            body = event_body(Event("FailedMount", "no volume", warning=True), job, datetime.now(UTC))
            await cluster.create({**body, "regarding": regarding})
        found = await cluster.list(EVENTS, namespace, None, {"regarding.uid": "uid-1"})
        assert [explain_wait([event]) for event in found] == ["FailedMount: no volume"] * 2
        assert await cluster.list(EVENTS, namespace, None, {"regarding.uid": "uid-3"}) == []

    async def test_a_list_covers_one_namespace_or_all(self, cluster: Cluster, namespace: str) -> None:
        labels = {"test": namespace}
        here = await cluster.create(config_map(namespace, "here", labels=labels))
        async with elsewhere(cluster, labels=labels) as there:

            async def uids(where: str | None) -> set[str]:
                return {item["metadata"]["uid"] for item in await cluster.list(CONFIG_MAPS, where, labels)}

            assert await uids(namespace) == {here["metadata"]["uid"]}
            assert await uids(None) == {here["metadata"]["uid"], there["metadata"]["uid"]}


class UpdateContract:
    async def test_update_replaces_the_object(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(endpoint_slice(namespace, "digits-0", "10.0.0.1"))
        updated = await cluster.update(created | {"endpoints": [{"addresses": ["10.0.0.2"]}]})
        assert updated["endpoints"][0]["addresses"] == ["10.0.0.2"]
        assert (updated["metadata"]["uid"], version(updated) == version(created)) == (created["metadata"]["uid"], False)
        assert await cluster.get(ENDPOINT_SLICES, namespace, "digits-0") == updated

    async def test_an_object_that_has_changed_since_it_was_read_is_not_replaced(
        self, cluster: Cluster, namespace: str
    ) -> None:
        created = await cluster.create(endpoint_slice(namespace, "digits-0", "10.0.0.1"))
        updated = await cluster.update(created | {"endpoints": []})
        with pytest.raises(Conflict):
            await cluster.update(created)
        assert await cluster.get(ENDPOINT_SLICES, namespace, "digits-0") == updated

    async def test_replacing_an_object_by_itself_changes_nothing(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(endpoint_slice(namespace, "digits-0", "10.0.0.1"))
        assert version(await cluster.update(created)) == version(created)


class StatusContract:
    async def test_update_status_changes_the_status(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        updated = await cluster.update_status(with_status(created, state="Running", attempt=1))
        assert (updated["status"]["state"], updated["status"]["attempt"]) == ("Running", 1)
        assert version(updated) != version(created)
        assert await cluster.get(JOBS, namespace, "digits") == updated

    async def test_update_status_replaces_the_status(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        first = await cluster.update_status(with_status(created, state="Running", startTime="2026-01-01T00:00:00Z"))
        second = await cluster.update_status(with_status(first, state="Succeeded"))
        assert "startTime" not in second["status"]

    async def test_update_status_changes_nothing_else(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        changed = with_status(created, state="Running")
        changed["spec"]["slice"]["count"] = 7
        changed["metadata"]["labels"] = {"a": "b"}
        updated = await cluster.update_status(changed)
        assert updated["spec"] == created["spec"]
        assert "labels" not in updated["metadata"]
        assert updated["metadata"]["generation"] == created["metadata"]["generation"]

    async def test_only_one_of_two_writers_with_the_same_read_succeeds(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        await cluster.update_status(with_status(created, state="Starting", attempt=1))
        with pytest.raises(Conflict):
            await cluster.update_status(with_status(created, state="Restarting", attempt=1))
        read = await cluster.get(JOBS, namespace, "digits")
        assert read["status"]["state"] == "Starting"

    async def test_writing_the_same_status_changes_nothing(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        updated = await cluster.update_status(with_status(created, state="Running"))
        again = await cluster.update_status(updated)
        assert version(again) == version(updated)

    async def test_the_status_of_a_deleted_job_is_not_found(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        await delete(cluster, created)
        with pytest.raises(NotFound):
            await cluster.update_status(with_status(created, state="Running"))

    async def test_the_status_of_a_namesake_is_a_conflict(self, cluster: Cluster, namespace: str) -> None:
        first = await cluster.create(job_body(namespace=namespace))
        await delete(cluster, first)
        await cluster.create(job_body(namespace=namespace))
        with pytest.raises(Conflict):
            await cluster.update_status(with_status(first, state="Running"))


class DeletionContract:
    async def test_a_deleted_object_is_gone(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(job_body(namespace=namespace))
        await delete(cluster, created)
        assert await is_gone(cluster, created)

    async def test_delete_of_another_uid_is_a_conflict(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(pod(namespace, "worker"))
        with pytest.raises(Conflict):
            await cluster.delete(PODS, namespace, "worker", ANOTHER_UID)
        assert not await is_gone(cluster, created)

    async def test_deleting_a_missing_object_is_not_found(self, cluster: Cluster, namespace: str) -> None:
        created = await cluster.create(config_map(namespace, "data"))
        await delete(cluster, created)
        with pytest.raises(NotFound):
            await delete(cluster, created)

    async def test_a_pod_that_waits_for_a_node_is_deleted_at_once(self, cluster: Cluster, namespace: str) -> None:
        worker = pod(namespace, "worker")
        worker["spec"]["nodeSelector"] = {"pool": "that-nobody-has"}
        created = await cluster.create(worker)
        await delete(cluster, created)
        assert await is_gone(cluster, created)

    async def test_a_pod_on_a_node_stays_for_its_grace_period(self, cluster: Cluster, namespace: str) -> None:
        worker = pod(namespace, "worker")
        worker["spec"]["nodeName"] = "a-node-whose-kubelet-is-silent"
        created = await cluster.create(worker)
        await delete(cluster, created)
        marked = await cluster.get(PODS, namespace, "worker")
        assert "deletionTimestamp" in marked["metadata"]
        await delete(cluster, created)
        again = await cluster.get(PODS, namespace, "worker")
        assert again["metadata"]["deletionTimestamp"] == marked["metadata"]["deletionTimestamp"]

    @pytest.mark.parametrize("grace", [None, 120], ids=["default", "given"])
    async def test_the_deletion_of_a_pod_is_dated_to_the_end_of_its_grace_period(
        self, cluster: Cluster, namespace: str, grace: int | None
    ) -> None:
        worker = pod(namespace, "worker")
        worker["spec"] |= {"nodeName": "a-node-whose-kubelet-is-silent"}
        worker["spec"] |= {} if grace is None else {"terminationGracePeriodSeconds": grace}
        created = await cluster.create(worker)
        await delete(cluster, created)
        metadata = (await cluster.get(PODS, namespace, "worker"))["metadata"]
        assert metadata["deletionGracePeriodSeconds"] == (grace or 30)
        # The API server keeps whole seconds, and the requests take time.
        lasts = parse_time(metadata["deletionTimestamp"]) - parse_time(metadata["creationTimestamp"])
        assert timedelta(seconds=(grace or 30) - 1) <= lasts <= timedelta(seconds=(grace or 30) + 60)


class GarbageContract:
    @pytest.mark.parametrize("kind", [config_map, pod], ids=lambda kind: kind.__name__)
    async def test_deleting_a_job_deletes_what_it_owned(
        self, cluster: Cluster, namespace: str, kind: Callable[..., Object]
    ) -> None:
        job = await cluster.create(job_body(namespace=namespace))
        dependent = await cluster.create(kind(namespace, "dependent", ownerReferences=owned_by(job)))
        free = await cluster.create(kind(namespace, "free"))
        await delete(cluster, job)
        await eventually(lambda: is_gone(cluster, dependent))
        assert not await is_gone(cluster, free)

    async def test_an_object_created_for_a_deleted_job_is_deleted_too(self, cluster: Cluster, namespace: str) -> None:
        job = await cluster.create(job_body(namespace=namespace))
        await delete(cluster, job)
        late = await cluster.create(pod(namespace, "late", ownerReferences=owned_by(job)))
        await eventually(lambda: is_gone(cluster, late))

    async def test_a_namesake_of_the_owner_does_not_keep_it(self, cluster: Cluster, namespace: str) -> None:
        job = await cluster.create(job_body(namespace=namespace))
        orphan = await cluster.create(
            config_map(namespace, "orphan", ownerReferences=owned_by(job, uid=ANOTHER_UID)),
        )
        await eventually(lambda: is_gone(cluster, orphan))
        assert not await is_gone(cluster, job)


class ClusterContract(
    CreationContract, ReadingContract, UpdateContract, StatusContract, DeletionContract, GarbageContract
):
    """All of it."""
