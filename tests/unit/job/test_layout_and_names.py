"""Which slice a reference means, and names that are unique and short enough everywhere."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import ABSENT, job, spec
from tpu_training_operator.api.catalogue import generations, shapes_of_type
from tpu_training_operator.api.constants import MAX_HOSTS, MAX_JOB_NAME_LENGTH
from tpu_training_operator.api.slice import SliceRef, requested_hosts
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.job.naming import (
    WorkerId,
    config_map_name,
    dns_name,
    slice_id,
    worker_labels,
    workers,
)
from tpu_training_operator.domain.job.topology import SliceLayout, layout_of

UID = "8b6b0c5e-1f7a-4c39-9d11-0242ac120002"
LONGEST_NAME = "a" * MAX_JOB_NAME_LENGTH
LARGEST = max((shape for g in generations().values() for shape in g.shapes), key=lambda shape: shape.hosts)
# The attempt, slice and host with as many digits as the name has room for.
LAST_WORKER = WorkerId(99_999, 255, LARGEST.hosts - 1)

LAYOUTS = st.builds(
    SliceLayout,
    st.sampled_from([s for g in generations().values() for s in g.shapes if s.hosts <= 64]),
    st.integers(1, 4),
)


def layout(**changes: Any) -> SliceLayout:
    fields = {f"slice.{name}": value for name, value in changes.items()}
    return layout_of(spec(fields | {"trainer.backend": "XLASPMD"}).slice, "spec.slice")


REFERENCES = [
    {"accelerator_type": shape.accelerator_type} | ({} if shape.default else {"machine_type": shape.machine_type.name})
    for g in generations().values()
    for shape in g.shapes
    if shape.machine_type
] + [
    {"generation": g.name, "topology": shape.topology}
    for g in generations().values()
    for shape in g.shapes
    if shape.default
]


def test_the_bound_of_the_api_counts_the_hosts_of_the_layout() -> None:
    slices = [SliceRef(**reference, count=count) for reference in REFERENCES for count in (1, 2, 9, 19, 20, 255, 256)]
    too_many = {str(ref): requested_hosts(ref) > MAX_HOSTS for ref in slices}
    assert too_many == {str(ref): layout_of(ref, "slice").hosts > MAX_HOSTS for ref in slices}


@given(
    sides=st.lists(st.integers(1, 9999), min_size=2, max_size=3),
    chips_per_host=st.integers(1, 64),
    count=st.integers(1, 256),
)
def test_it_counts_the_hosts_of_a_slice_that_the_user_describes(
    sides: list[int], chips_per_host: int, count: int
) -> None:
    topology = "x".join(map(str, sides))
    described = SliceRef(generation="tpu8t", topology=topology, chips_per_host=chips_per_host, count=count)
    try:
        hosts = layout_of(described, "slice").hosts
    except InvalidJob:
        return
    assert requested_hosts(described) == hosts


@pytest.mark.parametrize(
    ("changes", "hosts", "chips", "replicas", "text"),
    [
        ({"acceleratorType": "v5litepod-16"}, 4, 16, 16, "v5litepod-16"),
        ({"acceleratorType": "v5litepod-16", "count": 3}, 12, 48, 48, "3 x v5litepod-16"),
        ({"acceleratorType": "v3-32"}, 4, 16, 32, "v3-32"),
        ({"acceleratorType": "v5litepod-8"}, 2, 8, 8, "v5litepod-8"),
        ({"acceleratorType": "v5litepod-8", "machineType": "ct5lp-hightpu-8t"}, 1, 8, 8, "v5litepod-8"),
        ({"acceleratorType": ABSENT, "generation": "v5e", "topology": "4x4"}, 4, 16, 16, "v5litepod-16"),
        ({"acceleratorType": ABSENT, "generation": "v4", "topology": "4x4x16"}, 64, 256, 256, "v4-512"),
    ],
)
def test_hosts_chips_and_replicas_of_a_slice(
    changes: dict[str, Any], hosts: int, chips: int, replicas: int, text: str
) -> None:
    shape = layout(**changes)
    assert (shape.hosts, shape.chips, shape.replicas, str(shape)) == (hosts, chips, replicas, text)


@pytest.mark.parametrize(
    "changes",
    [
        {"acceleratorType": "v5litepod-16"},
        {"acceleratorType": "v5litepod-8"},
        {"acceleratorType": "v2-8", "hardware": "CPU"},
    ],
    ids=str,
)
def test_a_machine_type_without_the_shape_is_a_problem_that_names_the_others(
    changes: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(InvalidJob) as caught:
        layout(**changes, machineType="ct5lp-hightpu-1t")
    assert str(caught.value).startswith("spec.slice.machineType: ")
    assert str(caught.value) == snapshot


@given(layout=LAYOUTS, attempt=st.integers(1, 99_999))
def test_workers_are_listed_by_their_index_in_the_job(layout: SliceLayout, attempt: int) -> None:
    gang = workers(layout, attempt)
    indices = [worker.slice * layout.hosts_per_slice + worker.host for worker in gang]
    assert indices == list(range(layout.hosts))
    assert all(before < after for before, after in pairwise(gang))


@given(layout=LAYOUTS)
def test_no_two_workers_share_a_name_a_host_name_or_labels(layout: SliceLayout) -> None:
    gang = [*workers(layout, 1), *workers(layout, 2)]
    for identity in (
        lambda worker: worker.pod_name("digits"),
        lambda worker: dns_name("digits", layout, worker),
        lambda worker: str(sorted(worker_labels("digits", worker).items())),
    ):
        assert len(set(map(identity, gang))) == len(gang)


def test_the_longest_pod_name_fits() -> None:
    assert len(LAST_WORKER.pod_name(LONGEST_NAME)) <= 63


# The slices with the most hosts, and one of a future generation with as many hosts as a job may have.
LARGE_SLICES = [
    {"slice.generation": shape.generation, "slice.topology": shape.topology}
    for g in generations().values()
    if (shape := max(g.shapes, key=lambda shape: shape.hosts)).hosts > 500
] + [{"slice.generation": "tpu8t", "slice.topology": "100x200", "slice.chipsPerHost": 4}]


def longest_name(changes: dict[str, Any]) -> str:
    """The longest name that a job on this slice may have."""
    hosts = {f"spec.{path}": value for path, value in changes.items()} | {
        "spec.slice.acceleratorType": ABSENT,
        "spec.slice.hardware": "CPU",
    }
    for length in range(MAX_JOB_NAME_LENGTH, 0, -1):
        try:
            return job(hosts | {"metadata.name": "a" * length}).name
        except InvalidJob:
            continue
    raise AssertionError("no name is short enough")


@pytest.mark.parametrize("changes", LARGE_SLICES, ids=lambda changes: changes["slice.topology"])
def test_the_host_names_of_the_largest_slices_fit_into_one_variable(changes: dict[str, Any]) -> None:
    """Linux refuses a program (E2BIG) if one of its environment strings is larger than 128 KiB."""
    name, shape = longest_name(changes), layout(acceleratorType=ABSENT, hardware="CPU", **below("slice", changes))
    for attempt in (1, 9_999, 99_999):
        names = ",".join(dns_name(name, shape, worker) for worker in workers(shape, attempt))
        assert len(f"TPU_WORKER_HOSTNAMES={names}") + 1 <= 131_072
    subprocess.run([sys.executable, "-S", "-c", ""], env={"TPU_WORKER_HOSTNAMES": names}, check=True)


def below(section: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {path.removeprefix(f"{section}."): value for path, value in changes.items()}


def test_a_name_one_character_too_long_is_refused() -> None:
    allowed = {changes["slice.topology"]: len(longest_name(changes)) for changes in LARGE_SLICES}
    assert allowed == {"16x16x16": 48, "16x20x28": 46, "16x24x24": 44, "100x200": 14}


def test_every_label_fits_on_the_last_worker_of_the_largest_job() -> None:
    labels = worker_labels(LONGEST_NAME, LAST_WORKER)
    assert [value for value in (*labels.values(), slice_id(UID, LAST_WORKER)) if len(value) > 63] == []


_NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,6}[a-z0-9])?", fullmatch=True)
_WORKERS = st.builds(WorkerId, st.integers(1, 20), st.integers(0, 12), st.integers(0, 12))


@given(names=st.tuples(_NAMES, _NAMES).filter(lambda names: names[0] != names[1]), ones=_WORKERS, others=_WORKERS)
def test_no_two_jobs_want_the_same_names(names: tuple[str, str], ones: WorkerId, others: WorkerId) -> None:
    first, second = names
    assert ones.pod_name(first) != others.pod_name(second)
    assert config_map_name(first, ones.attempt) != config_map_name(second, others.attempt)


@pytest.mark.parametrize(("first", "second"), [("a", "a-1"), ("a", "a-1-0"), ("a-1", "a-1-1"), ("a-0-0", "a")])
def test_a_job_with_the_name_of_another_jobs_pod_does_not_take_its_pods(first: str, second: str) -> None:
    layout = SliceLayout(shapes_of_type("v4-128")[0], 2)
    gang = [*workers(layout, 1), *workers(layout, 11)]
    assert {w.pod_name(first) for w in gang} & {w.pod_name(second) for w in gang} == set()


def test_a_slice_of_another_attempt_or_job_is_another_slice() -> None:
    leader = WorkerId(1, 0, 0)
    ids = [slice_id(UID, leader), slice_id(UID, WorkerId(2, 0, 0)), slice_id(UID, WorkerId(1, 1, 0))]
    ids.append(slice_id(UID.replace("8", "9"), leader))
    assert len(set(ids)) == 4
    assert slice_id(UID, leader) == slice_id(UID, WorkerId(1, 0, 3))
