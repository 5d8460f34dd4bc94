"""The operator's variables beside those of GKE's device plugin: which of the two sets what, and where both do."""

from dataclasses import replace

import pytest

from tests.contract.device_plugin import (
    PUBLISHED,
    SHAPE_OF_DYNAMIC_SLICE,
    Published,
    device_plugin,
    injected,
    node_of,
)
from tests.contract.jobs import KINDS_OF_JOBS, stored_job
from tests.contract.pods import REPORTING, worker_environments
from tests.contract.slices import job_on, pod_env
from tpu_training_operator.api.catalogue import Shape, generations
from tpu_training_operator.api.constants import RESERVED_ENV
from tpu_training_operator.api.slice import Formation
from tpu_training_operator.domain.job.naming import workers
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.shared import config_map

SHAPES = [
    pytest.param(shape, id=f"{shape.generation}-{shape.topology}-{shape.chips_per_host}t")
    for generation in generations().values()
    if generation.on_gke
    for shape in generation.shapes
]

# Every name that any node can have.
ALL_NAMES = {name for row in PUBLISHED for name in injected(row.node, **(row.options or {}))}


def row_id(row: Published) -> str:
    options = "-".join(f"{name}={value}" for name, value in (row.options or {}).items())
    return "-".join(filter(None, [row.node.label, str(row.node.topology), f"{row.node.chips}t", options]))


@pytest.mark.parametrize("row", PUBLISHED, ids=row_id)
def test_the_plugins_rules_are_the_published_ones(row: Published) -> None:
    options = row.options or {}
    expected = {
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_RUNTIME_METRICS_PORTS": ",".join(str(8431 + port) for port in range(row.ports)),
        "VBAR_CONTROL_SERVICE_URL": "unix:///var/run/tpu-plugin/vbar.sock",
        "TPU_TOPOLOGY": row.topology or row.node.topology,
        "TPU_ACCELERATOR_TYPE": row.accelerator_type,
        "TPU_HOST_BOUNDS": row.hosts,
        "HOST_BOUNDS": row.hosts,
        "TPU_CHIPS_PER_HOST_BOUNDS": row.per_host,
        "CHIPS_PER_HOST_BOUNDS": row.per_host,
        "TPU_TOPOLOGY_WRAP": row.wrap,
        "WRAP": row.wrap,
        "TPU_TOPOLOGY_ALT": None if row.hosts is None else "false",
        "ALT": None if row.hosts is None else "false",
        "ENABLE_ICI_RESILIENCY": row.resiliency,
        "TPU_WORKER_ID": "0" if row.alone else None,
        "TPU_WORKER_HOSTNAMES": "localhost" if row.alone else None,
        "TPU_VISIBLE_CHIPS": ",".join(map(str, options["visible"])) if "visible" in options else None,
        "WORKLOAD_NIC_PREFERRED_NUMA": ",".join(map(str, options["numa"])) if "numa" in options else None,
    }
    assert injected(row.node, **options) == {name: value for name, value in expected.items() if value is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plugin_and_the_catalogue_describe_one_slice(shape: Shape) -> None:
    env = device_plugin(shape)
    assert env["TPU_ACCELERATOR_TYPE"] == shape.accelerator_type
    assert env.get("TPU_HOST_BOUNDS", "1,1,1") == ",".join(map(str, shape.host_bounds))
    assert ("TPU_WORKER_ID" in env) == (shape.hosts == 1 and shape.generation != "tpu7x")


@pytest.mark.parametrize("shape", SHAPES)
def test_what_both_set_has_one_value(shape: Shape) -> None:
    """The order of a container's variables decides whose value counts; no test here has the plugin, so that must not
    matter."""
    job = job_on(shape)
    resolution = resolve(job.spec)
    (first, *_) = workers(resolution.layout, 1)
    ours, theirs = pod_env(job, resolution, first, config_map(job, resolution, 1)["data"]), device_plugin(shape)
    assert {name: ours[name] for name in ours.keys() & theirs.keys()} == {
        name: theirs[name] for name in ours.keys() & theirs.keys()
    }


@pytest.mark.parametrize("changes", KINDS_OF_JOBS.values(), ids=KINDS_OF_JOBS.keys())
def test_the_operator_sets_nothing_else_that_the_plugin_sets(changes: dict[str, object]) -> None:
    job = stored_job(changes)
    shape = SHAPE_OF_DYNAMIC_SLICE if job.spec.slice.formation is Formation.DYNAMIC_SLICE else set()
    for environ in worker_environments(job, REPORTING):
        assert environ.keys() & ALL_NAMES <= {"TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", *shape}


def test_a_host_alone_that_the_plugin_leaves_without_a_number_gets_ours() -> None:
    """On tpu7x GKE's webhook would set it, for pods of a Job or a JobSet."""
    shape = next(shape for shape in generations()["tpu7x"].shapes if shape.hosts == 1)
    assert "TPU_WORKER_ID" not in injected(node_of(shape))
    (environ,) = worker_environments(job_on(shape))
    assert (environ["TPU_WORKER_ID"], environ["TPU_WORKER_HOSTNAMES"]) == ("0", "localhost")


def test_a_dynamic_slice_gets_from_us_what_the_plugin_cannot_know() -> None:
    shape = next(shape for shape in generations()["tpu7x"].shapes if shape.topology == "4x4x8")
    job = job_on(shape, formation="DynamicSlice")
    known = {name: device_plugin(shape)[name] for name in SHAPE_OF_DYNAMIC_SLICE}
    assert known.keys().isdisjoint(injected(replace(node_of(shape), topology=None)))
    for environ in worker_environments(job):
        assert {name: environ[name] for name in known} == known


def test_users_cannot_set_what_places_a_worker_in_its_slice() -> None:
    places = {"TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_VISIBLE_CHIPS", "TPU_SKIP_MDS_QUERY"}
    assert places <= ALL_NAMES
    assert places <= set(RESERVED_ENV)
