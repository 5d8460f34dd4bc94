"""What `compile-check` traces, before anything is compiled: the worker's programs, on slices of any size, and what is
found in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.aot import models
from tests.aot.test_step_on_a_chip import run_spec, traced_steps
from tests.trainer.gang_processes import ROOT, Launcher
from tpu_trainer.gang.backends.feed import AHEAD
from tpu_training_operator.api.catalogue import Shape, generations

BATCH, PASSES = 8, 4
OWN_FLAG = "--xla_tpu_scoped_vmem_limit_kib=65536"
LARGEST = {name: max(entry.shapes, key=lambda shape: shape.devices) for name, entry in generations().items()}
"""The largest slice of each generation."""


def case(entrypoint: str, replicas: int = 4, generation: str = "v5e", **changes: Any) -> dict[str, Any]:
    where = {"generation": generation, "topology": "2x2", "slices": 1, "hosts": 1, "replicas": replicas}
    return run_spec(entrypoint, slice=where, **{"batch": {"global": replicas * BATCH, "perReplica": BATCH}, **changes})


def largest(shape: Shape) -> dict[str, Any]:
    return case("small", shape.devices, shape.generation)


CASES = {
    "step": case("small"),
    "accumulated": case("small", batch={"global": 4 * PASSES * BATCH, "perReplica": BATCH, "accumulation": PASSES}),
    "grows": case("grows"),
    "kernel": case("calls_a_kernel"),
    "places": case("places"),
    **{what: case("keeps", parameters={"what": what}) for what in ("nothing", "lost")},
    **{how: case("repeats", parameters={"how": how}) for how in ("scan", "unroll")},
    **{what: case("steps_with", parameters={"what": what}) for what in models.THINGS},
    **{f"largest-{name}": largest(shape) for name, shape in LARGEST.items()},
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return traced_steps(tmp_path_factory.mktemp("traced"), CASES, LIBTPU_INIT_ARGS=OWN_FLAG)


def products(program: dict[str, Any]) -> int:
    return str(program["stablehlo"]).count("stablehlo.dot_general")


def without_name(program: dict[str, Any]) -> str:
    return str(program["stablehlo"]).partition("\n")[2]


def test_with_accumulation_each_program_has_the_products_of_one_pass(traced: dict[str, dict[str, Any]]) -> None:
    """Traces passes as a worker sends them off: all in one program would hold all their activations at once."""
    accumulated = traced["accumulated"]
    one = products(traced["step"]["program"])
    assert (products(accumulated["passes"]), products(accumulated["program"])) == (one, one)
    assert accumulated["flops"] == traced["step"]["flops"]


@pytest.mark.parametrize("generation", LARGEST)
def test_a_replica_of_the_largest_slice_runs_the_program_of_a_small_one(
    generation: str, traced: dict[str, dict[str, Any]]
) -> None:
    step = traced[f"largest-{generation}"]
    assert "error" not in step, step["error"]
    assert without_name(step["program"]) == without_name(traced["step"]["program"])


def test_a_loop_counts_once_for_each_trip(traced: dict[str, dict[str, Any]]) -> None:
    # The gradient of the inputs, which nobody needs, is a product of the first layer in a loop only.
    assert traced["scan"]["flops"] - traced["unroll"]["flops"] == 2 * BATCH * 8 * 8
    assert traced["scan"]["found"] == []


@pytest.mark.parametrize(
    ("what", "kind", "operation"),
    [
        ("item", "HostRead", "aten::_local_scalar_dense"),
        ("cpu", "HostRead", "aten::_to_copy"),
        ("numpy", "HostRead", "aten::_to_copy"),
        ("tolist", "HostRead", "aten::_to_copy"),
        ("print", "HostRead", "print"),
        ("copy", "HostRead", "aten::copy_"),
        ("mask", "DynamicShape", "aten::index"),
        ("unique", "DynamicShape", "aten::_unique2"),
        ("solve", "Fallback", "aten::linalg_lstsq"),
        ("count", "Fallback", "aten::histc"),
        ("grows", "DifferentPrograms", None),
    ],
)
def test_what_is_not_one_fixed_program_is_found_in_its_line(
    traced: dict[str, dict[str, Any]], what: str, kind: str, operation: str | None
) -> None:
    assert "error" not in traced[what], traced[what]["error"]
    (one,) = traced[what]["found"]
    assert one["kind"] == kind
    assert operation in (None, one["operation"])
    assert one["where"] == line_of(what)


def line_of(mark: str) -> str:
    source = Path(models.__file__)
    marked = (number for number, text in enumerate(source.read_text().splitlines(), 1) if text.endswith(f"  # {mark}"))
    (line,) = marked
    return f"{source.relative_to(ROOT)}:{line}"


def test_a_batch_of_any_size_is_traced_with_a_few_examples(tmp_path: Path) -> None:
    """The search for the largest batch does this: the dataset has a thousand examples, as the recipe says, and the step
    needs 65 thousand."""
    size = 1 << 14
    spec = case("few", batch={"global": 4 * size, "perReplica": size}, datasetSize=1000)
    step = traced_steps(tmp_path, {"step": spec}, examples=4)["step"]
    assert "error" not in step, step["error"]
    assert step["ahead"] == (AHEAD + 1) * size * 2 * 8 * 4
    assert f"tensor<{size}x8xf32>" in step["program"]["stablehlo"]


@pytest.mark.parametrize("what", ["columns", "pick"])
def test_an_index_of_integers_has_a_fixed_shape(what: str, traced: dict[str, dict[str, Any]]) -> None:
    assert traced[what]["found"] == []
    assert "program" in traced[what]


@pytest.mark.parametrize("generation", LARGEST)
def test_libtpu_gets_the_jobs_own_flags_and_those_that_torch_xla_sets_for_the_generation(
    generation: str, traced: dict[str, dict[str, Any]]
) -> None:
    flags = traced[f"largest-{generation}"]["flags"].split()
    assert flags[0] == OWN_FLAG
    assert "--xla_latency_hiding_scheduler_rerun=1" in flags
    assert ("--xla_enable_async_all_gather=true" in flags) == generation.startswith("v5")


def test_lookups_and_resizes_are_a_tpus(traced: dict[str, dict[str, Any]]) -> None:
    """On a CPU the gradient of a resize has no kernel, and a lookup reads single rows."""
    step = traced["places"]
    assert step["found"] == []
    text = step["program"]["stablehlo"]
    assert re.findall(r"custom_call @(\w+)", text) == [
        "ResizeBilinear",
        "ResizeNearest",
        "ResizeNearestGrad",
        "ResizeBilinearGrad",
    ]
    assert "stablehlo.gather" not in text
    assert "stablehlo.scatter" not in text


def test_lookups_as_on_a_tpu_find_what_others_find(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    try:
        found = json.loads(launcher.run_on_xla("tests.aot.lookups"))
    finally:
        launcher.reap()
    assert len(found) == 12
    assert all(found.values()), found


def test_a_kernel_that_only_a_tpu_runs_is_part_of_the_program(traced: dict[str, dict[str, Any]]) -> None:
    step = traced["kernel"]
    assert "error" not in step, step["error"]
    assert step["program"]["stablehlo"].count("@tpu_custom_call") == 1
    assert step["found"] == []


def test_a_tensor_that_its_owner_has_let_go_is_no_part_of_the_step(traced: dict[str, dict[str, Any]]) -> None:
    assert traced["lost"]["digest"] == traced["nothing"]["digest"]
