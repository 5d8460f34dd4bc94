"""What the TPU's own compiler makes of the trainer's step: memory, and when gradients are summed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.aot.compile_for_tpu import Compiler, compiler
from tests.trainer import fork_server
from tests.trainer.gang_processes import ON_XLAS_CPU, Launcher
from tpu_trainer.checks.compile.hlo import read

SLICE = "v5e:2x2"
CHIPS, LAYERS, WIDTH, BATCH = 4, 2, 4096, 8192
"""A layer's weights make one bucket, and its activations take twice as much memory."""

SMALL = 1024
"""The width of the layers that are compared with each other."""


def bytes_of(width: int) -> int:
    """Returns the size of the weights in float32."""
    return 4 * LAYERS * (width * width + width)


PARAMETERS, FEW_PARAMETERS = bytes_of(WIDTH), bytes_of(SMALL)


def run_spec(entrypoint: str = "deep", **changes: Any) -> dict[str, Any]:
    generation, topology = SLICE.split(":")
    return {
        "schema": "runspec/v1",
        "job": {"namespace": "default", "name": "step", "uid": "5f0c", "attempt": 1},
        "entrypoint": f"tests.aot.models:{entrypoint}",
        "backend": "xla",
        "hardware": "TPU",
        "slice": {"generation": generation, "topology": topology, "slices": 1, "hosts": 1, "replicas": CHIPS},
        "batch": {"global": CHIPS * BATCH, "perReplica": BATCH},
        "trainSteps": 100,
        "warmupSteps": 5,
        "seed": 3,
        "optimizer": {"name": "adamw", "learningRate": "0.02"},
        "parameters": {"width": str(WIDTH), "layers": str(LAYERS)} if entrypoint == "deep" else {},
        **changes,
    }


def traced_steps(
    directory: Path, specs: Mapping[str, Any], examples: int | None = None, **env: str
) -> dict[str, dict[str, Any]]:
    """Returns what `compile-check` traces of each run spec, by its name. Their number of devices is the first one's.
    `examples`: how many are read for a batch, if not all."""
    for name, spec in specs.items():
        (directory / f"{name}.json").write_text(json.dumps(spec))
    more = {"TEST_STEPS": str(directory), "TEST_EXAMPLES": json.dumps(examples), **ON_XLAS_CPU, **env}
    launcher = Launcher(directory)
    try:
        launcher.run_alone("tests.aot.traced_step", fork_server.XLA, **more)
    finally:
        launcher.reap()
    return {name: json.loads((directory / f"{name}.traced").read_bytes()) for name in specs}


def small(**changes: Any) -> dict[str, Any]:
    batch = {"global": CHIPS * 2 * SMALL, "perReplica": 2 * SMALL}
    return run_spec(batch=batch, parameters={"width": str(SMALL), "layers": str(LAYERS)}, **changes)


CASES = {
    # Its name tells `traced_step` to leave the gradients as they are.
    "unreduced": run_spec(),
    "step": run_spec(),
}
QUICKLY = {
    "plain": small(),
    "mixed": small(precision="BFloat16Mixed"),
    "divided": small(sharding="Optimizer"),
    "of-all-kinds": run_spec("of_all_kinds"),
}
"""Compiled with the least effort, and compared with each other: with its own the compiler takes a minute for them."""


@dataclass(frozen=True)
class Step:
    """temporary, moved: bytes of HBM that a step needs besides what lives on, and that it reads and writes.

    kept, other: bytes of its results: of weights and optimizer state, and of all else.
    order: "matmul" and "sum" (an all-reduce), in the order in which a chip executes them. exchanged: bytes that a chip
    puts into the collectives, by their kind.
    """

    traced: str
    kept: int
    other: int
    temporary: int
    moved: int
    order: list[str]
    exchanged: dict[str, int]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    directory = tmp_path_factory.mktemp("programs")
    traced = traced_steps(directory, CASES | QUICKLY, examples=4)
    with compiler(Launcher(directory).base()) as libtpu:
        return {name: _compiled(libtpu, step, quickly=name in QUICKLY) for name, step in traced.items()}


def _compiled(libtpu: Compiler, traced: dict[str, Any], *, quickly: bool) -> Step:
    assert "program" in traced, traced
    answer = libtpu.compile(traced, run_spec()["slice"], quickly=quickly)
    program = answer["programs"]["program"]
    scheduled = read(program["hlo"])
    text = traced["program"]["stablehlo"]
    kept, other = traced["program"]["kept"], traced["program"]["other"]
    exchanged: dict[str, int] = {}
    for collective in scheduled.collectives:
        exchanged[collective.kind] = exchanged.get(collective.kind, 0) + collective.bytes
    return Step(text, kept, other, program["temporaries"], program["bytesMoved"], scheduled.order, exchanged)


def test_the_gradients_are_in_memory_once(steps: dict[str, Step], record_property: Any) -> None:
    step, unreduced = steps["step"], steps["unreduced"]
    text = f"a step of {PARAMETERS / 1e6:.0f} MB of weights on {SLICE}: {step.temporary / 1e6:.0f} MB of temporaries, "
    record_property("measured", text + f"{step.moved / 1e9:.2f} GB moved")
    assert step.temporary <= unreduced.temporary * 1.1 + PARAMETERS
    # A gradient is written, then summed in place, then read by the update; the compiler's estimate is a little higher.
    assert step.moved <= unreduced.moved + 6.5 * PARAMETERS


def test_a_step_leaves_nothing_behind_but_weights_state_and_signals(steps: dict[str, Step]) -> None:
    assert steps["step"].kept == pytest.approx(3 * PARAMETERS, rel=1e-3)
    # Signals, and what the task logs.
    assert steps["step"].other < 1000


def test_the_first_gradients_are_summed_before_the_last_are_made(steps: dict[str, Step]) -> None:
    order = steps["step"].order
    assert order.count("sum") == LAYERS
    # Forward: one matmul a layer; backward: two, but the first layer's inputs need no gradient.
    assert order.count("matmul") == 3 * LAYERS - 1
    assert "sum" in order[: len(order) - order[::-1].index("matmul")]
    assert steps["unreduced"].order == ["matmul"] * (3 * LAYERS - 1)


def test_gradients_of_every_type_are_summed(steps: dict[str, Step]) -> None:
    program = steps["of-all-kinds"].traced
    (singles, doubles) = (line for line in program.splitlines() if "stablehlo.return" not in line and "}) : (" in line)
    assert singles.count("tensor<4xf32>, tensor") >= 2
    assert "tensor<4x2xf32>" in singles
    assert "tensor<4xf64>" in doubles


def test_in_mixed_precision_matrices_are_multiplied_in_bfloat16_and_activations_take_less_memory(
    steps: dict[str, Step], record_property: Any
) -> None:
    products = re.findall(r"dot_general .*: \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\)", steps["mixed"].traced)
    assert products == [("bf16", "bf16")] * (3 * LAYERS - 1)
    mixed, single = steps["mixed"].temporary, steps["plain"].temporary
    text = f"the same step in mixed precision: {mixed / 1e6:.0f} MB of temporaries"
    record_property("measured", text)
    assert mixed < 0.9 * single
    assert steps["mixed"].kept == steps["plain"].kept


def test_a_divided_optimizer_keeps_a_chips_share_of_its_state(steps: dict[str, Step], record_property: Any) -> None:
    divided, step = steps["divided"], steps["plain"]
    # The weights, and of two moments a part each; biases fill up their last row.
    assert divided.kept == pytest.approx(FEW_PARAMETERS * (1 + 2 / CHIPS), rel=1e-3)
    record_property(
        "measured",
        f"with a divided optimizer: {divided.kept / 1e6:.0f} MB live on instead of {step.kept / 1e6:.0f}, "
        f"{divided.temporary / 1e6:.0f} MB of temporaries instead of {step.temporary / 1e6:.0f}",
    )
    assert divided.kept + divided.temporary < 0.9 * (step.kept + step.temporary)
    assert divided.other < 1000


def test_a_divided_optimizer_sends_half_as_much_again(steps: dict[str, Step]) -> None:
    """The sum of n replicas sends 2(n-1)/n of the gradients; the gathering of their parts (n-1)/n of the weights."""
    assert steps["plain"].exchanged == {"all-reduce": pytest.approx(FEW_PARAMETERS, rel=1e-3)}
    divided = steps["divided"].exchanged
    assert divided["all-reduce"] == pytest.approx(FEW_PARAMETERS, rel=1e-3)
    assert divided["all-gather"] * CHIPS == pytest.approx(FEW_PARAMETERS, rel=1e-3)
    assert divided.keys() == {"all-reduce", "all-gather"}
