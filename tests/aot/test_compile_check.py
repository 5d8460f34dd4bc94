"""`compile-check`: figures against arithmetic by hand, every generation, what does not fit, what is not one program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from tests.aot.compile_for_tpu import compiler
from tests.aot.test_step_on_a_chip import run_spec, traced_steps
from tests.trainer.gang_processes import Launcher
from tpu_trainer.checks.compile import check as checking
from tpu_trainer.checks.compile import compiling, search
from tpu_trainer.checks.compile.cache import AnswerCache
from tpu_trainer.checks.compile.check import CannotCheckError, check
from tpu_trainer.checks.compile.compiling import limit_in, used_in

REPLICAS = 8
SLICES = {"v2": "2x2", "v3": "2x2", "v4": "2x2x2", "v5e": "2x4", "v5p": "2x2x2", "v6e": "2x4"}
"""A slice of eight replicas of every generation that libtpu 0.0.21 knows."""

GIBIBYTES = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 96, "v6e": 32}
"""Of a core's memory."""

WIDTH, LAYERS, BATCH = 1024, 3, 1016
"""No other number of a program is 1016. An example's activations take 4 KiB a layer."""

WEIGHTS = 2 * 8 * WIDTH + LAYERS * WIDTH * WIDTH
PARAMETERS = WEIGHTS + (LAYERS + 1) * WIDTH + 8


def spec_of(generation: str, batch: int = BATCH) -> dict[str, Any]:
    return run_spec(
        "small",
        slice={
            "generation": generation,
            "topology": SLICES.get(generation, "2x2x1"),
            "slices": 1,
            "hosts": 1,
            "replicas": REPLICAS,
        },
        batch={"global": REPLICAS * batch, "perReplica": batch},
        parameters={"width": str(WIDTH), "layers": str(LAYERS)},
        # A rung with fewer steps than are traced.
        warmupSteps=0,
        trainSteps=2,
        endAfterSteps=2,
    )


@dataclass
class Effort:
    """How hard the compiler tries from now on. Its own effort takes it up to eight times as long as the least."""

    least: bool = True


@pytest.fixture(scope="module", autouse=True)
def effort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Effort]:
    """One trace serves all: a program of another batch differs in that number, and only compiling depends on the
    generation. One process compiles them."""
    effort = Effort()

    def trace(request: Mapping[str, Any]) -> dict[str, Any]:
        batch = request["spec"]["batch"]["perReplica"]
        of_size = re.sub(rf"(?<=[<x]){BATCH}(?=x)", str(batch), traced["program"]["stablehlo"])
        program = {**traced["program"], "stablehlo": of_size}
        return {**traced, "program": program, "ahead": traced["ahead"] // BATCH * batch}

    def compile_step(step: Mapping[str, Any], where: Mapping[str, Any], _: AnswerCache) -> dict[str, Any]:
        return libtpu.compile(step, where, quickly=effort.least)

    folder = tmp_path_factory.mktemp("traced")
    traced = traced_steps(folder, {"step": spec_of("v5e")})["step"]
    assert "error" not in traced, traced["error"]
    with (
        compiler(Launcher(folder).base()) as libtpu,
        mock.patch.object(checking, "_trace", trace),
        mock.patch.object(compiling, "compile_step", compile_step),
    ):
        yield effort


@pytest.mark.parametrize("generation", SLICES)
def test_memory_and_operations_are_what_arithmetic_says(
    generation: str, effort: Effort, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    # As for users where that takes least. Near the limit it takes ten times as long.
    monkeypatch.setattr(effort, "least", generation != "v2")
    answer = check(spec_of(generation))
    memory, step = answer["memory"], answer["step"]
    assert answer["fits"]
    # What the compiler says when it refuses a program.
    assert memory["limit"] == pytest.approx(GIBIBYTES[generation] << 30, rel=0.07)
    # Weights and two moments of AdamW, in float32, updated in place.
    assert memory["inPlace"] == pytest.approx(3 * 4 * PARAMETERS, rel=0.02)
    # And an example's inputs and targets, eight numbers each.
    assert memory["arguments"] == pytest.approx(memory["inPlace"] + BATCH * 2 * 8 * 4, rel=0.02)
    # Forward, and backward for weights and for inputs; the first layer's inputs need no gradient.
    assert step["modelFlops"] == 2 * BATCH * (3 * WEIGHTS - 8 * WIDTH)
    assert step["flops"] == pytest.approx(step["modelFlops"], rel=0.05)
    (exchange,) = step["collectives"]
    assert exchange["kind"] == "all-reduce"
    assert exchange["bytes"] == pytest.approx(4 * PARAMETERS, rel=0.02)
    text = f"{answer['device']}: {memory['limit'] / 2**30:.2f} GiB for a program"
    record_property("measured", text)


def test_instead_of_a_batch_that_cannot_fit_the_largest_that_does_is_found(record_property: Any) -> None:
    """The search knows nothing of a generation but its memory: v2 has the least, and compiles fastest."""
    generation = "v2"
    # An activation and a gradient of it are there at once, at least; this many alone fill the memory.
    activations = WIDTH * 4 * 2
    batch = (GIBIBYTES[generation] << 30) // activations
    answer = check(spec_of(generation, batch))
    memory, found = answer["memory"], answer["largestBatch"]
    assert answer["fits"] is False
    assert "hbm" in answer["refusal"]
    assert memory["needed"] > max(memory["limit"], batch * activations)
    assert found["fits"] * activations < memory["limit"]
    assert 0 < found["fits"] < found["refused"] <= batch
    assert found["refused"] - found["fits"] <= max(search.ROWS, found["fits"] / search.PRECISION)
    record_property("measured", f"{generation}: {batch} does not fit, {found['fits']} does")


def test_a_generation_that_libtpu_does_not_know_is_said() -> None:
    with pytest.raises(CannotCheckError, match=r"libtpu .* does not compile for tpu7x 2x2x1: .*; a newer one may"):
        check(spec_of("tpu7x"))


def test_the_refusals_numbers_are_read() -> None:
    said = "Ran out of memory in memory space hbm. Used 16.38G of 15.75G hbm. Exceeded hbm capacity by 647.52M."
    assert limit_in(said) == int(15.75 * 2**30)
    assert used_in(said) == int(16.38 * 2**30)
    assert limit_in("INTERNAL: something else") is None
