"""Compiles traced programs for a TPU slice with libtpu's compile-only client, on a machine without a TPU."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from tpu_trainer.checks.compile.cache import AnswerCache

MEGACORE = {"v4": "megacore"}
"""Where torch_xla drives a chip's two cores as one device, but libtpu's own default is two."""

PROBE_ARGUMENTS = 64
PROBE = "tensor<4294967296xf32>"
"""64 arguments of 16 GiB each: they fit into no core's memory, and the refusal says how much a program may use."""

_LIMIT = re.compile(r"of ([0-9.]+)([KMGT]?) hbm\.")
_USED = re.compile(r"Used ([0-9.]+)([KMGT]?) of")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class UnknownSliceError(Exception):
    """This libtpu does not compile for the slice."""


def compile_step(
    traced: Mapping[str, Any], where: Mapping[str, Any], cache: AnswerCache | None = None
) -> dict[str, Any]:
    """Returns what the compiler says about the programs of a traced step, for `where`, a run spec's slice; what `cache`
    holds is not compiled again.

    The first call loads libtpu, with the flags of this step.

    Raises:
        UnknownSliceError: as it says, or the slice has another number of devices than the job has replicas.
    """
    # libtpu reads these when it is loaded. Without chips it has nothing that two processes could not share.
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        JAX_PLATFORMS="cpu",
        LIBTPU_INIT_ARGS=traced["flags"],
    )
    devices = _devices(where["generation"], where["topology"])
    if len(devices) != where["replicas"]:
        topology = f"{where['generation']}:{where['topology']}"
        raise UnknownSliceError(
            f"libtpu sees {len(devices)} devices on {topology}, the job has {where['replicas']} replicas"
        )
    names = [name for name in ("program", "passes") if traced.get(name) is not None]
    cache = cache or AnswerCache()

    def ask(program: Mapping[str, Any], devices: list[Any]) -> dict[str, Any]:
        answer: dict[str, Any] = cache.ask(program, where, lambda: _compile(program, devices))
        return answer

    programs = {name: ask(traced[name], devices) for name in names}
    limit = limit_in(ask({"stablehlo": _probe(), "in_place": []}, devices[:1]).get("refused", ""))
    return {"device": devices[0].device_kind, "limit": limit, "programs": programs}


@functools.cache
def _devices(generation: str, topology: str) -> list[Any]:
    """Returns the devices of a slice, one per replica."""
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if generation in MEGACORE:
        options["chip_config_name"] = MEGACORE[generation]
    if topology == "1x1":
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{topology}", **options)
    except Exception as error:
        # jaxlib's own class, and NotImplementedError from older ones.
        newer = "; a newer one may" if "Invalid TPU external name" in str(error) else ""
        version = metadata.version("libtpu")
        raise UnknownSliceError(
            f"libtpu {version} does not compile for {generation} {topology}: {error}{newer}"
        ) from None
    return list(description.devices)


def compile_program(program: str, in_place: list[tuple[int, int]], devices: list[Any]) -> Any:
    """Returns the executable; `in_place` as in `tracing.Program`. Raises jaxlib's error if the compiler refuses."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    def aliased(result: int | None) -> Any:
        if result is None:
            return ir.DictAttr.get({})
        return ir.DictAttr.get({"tf.aliasing_output": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)})

    options = compiler.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=np.array([[device.id] for device in devices])
    )
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(program)
        # torch_xla updates weights and optimizer state in place.
        function = module.body.operations[0]
        results = dict(in_place)
        count = len(function.arguments)
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([aliased(results.get(index)) for index in range(count)])
        return devices[0].client.compile(
            mlir.module_to_bytecode(module),
            executable_devices=xla_client.DeviceList(tuple(devices)),
            compile_options=options,
        )


def _probe() -> str:
    """Returns a program that the compiler refuses, and says how much of a core's memory a program may use."""
    arguments = ", ".join(f"%arg{number}: {PROBE}" for number in range(PROBE_ARGUMENTS))
    body = f"%0 = stablehlo.add %arg0, %arg1 : {PROBE}\n return %0 : {PROBE}"
    return f"module @probe {{ func.func @main({arguments}) -> {PROBE} {{ {body} }} }}"


def limit_in(refusal: str) -> int | None:
    """Returns the bytes of a core's memory that a program may use; None if the refusal does not state them."""
    return _size(_LIMIT.search(refusal))


def used_in(refusal: str) -> int | None:
    """Returns the bytes that the refused program would have needed."""
    return _size(_USED.search(refusal))


def _size(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def _compile(traced: Mapping[str, Any], devices: list[Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        program = compile_program(traced["stablehlo"], traced["in_place"], devices)
    except Exception as error:
        # jaxlib's own class. Only a lack of memory says something about the batch.
        refusal = str(error)
        fits = False if "RESOURCE_EXHAUSTED" in refusal else None
        return {"refused": refusal, "needed": used_in(refusal), "fits": fits}
    memory, costs = program.get_compiled_memory_stats(), program.cost_analysis()
    return {
        "seconds": time.monotonic() - began,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "inPlace": memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "flops": costs.get("flops"),
        "bytesMoved": costs.get("bytes accessed"),
        "hlo": program.hlo_modules()[0].to_string(),
    }
