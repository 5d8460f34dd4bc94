"""Compiles programs for a TPU slice with libtpu's compile-only client, on a machine without a TPU.

`python -m tests.aot.compile_for_tpu DIRECTORY` reads what `traced_step` has written, and writes NAME.hlo, the program
as it is scheduled on a chip, and NAME.costs: bytes of HBM by use, and bytes that the program moves.

A process of its own: jaxlib and torch_xla each bring an XLA.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SLICE = "v5e:2x2"


def compiled(program: str, in_place: list[tuple[int, int]], devices: list[Any]) -> Any:
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


def main(directory: Path) -> None:
    # libtpu reads these when it is loaded.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", LIBTPU_INIT_ARGS=(directory / "flags").read_text())
    from jax.experimental import topologies

    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=SLICE).devices)
    for path in sorted(directory.glob("*.mlir")):
        arguments = json.loads(path.with_suffix(".arguments").read_bytes())
        program = compiled(path.read_text(), arguments["in_place"], devices)
        memory = program.get_compiled_memory_stats()
        costs = {
            "temporary": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "in_place": memory.alias_size_in_bytes,
            "moved": program.cost_analysis()["bytes accessed"],
        }
        path.with_suffix(".costs").write_text(json.dumps(costs))
        path.with_suffix(".hlo").write_text(program.hlo_modules()[0].to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
