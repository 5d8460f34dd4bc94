"""`python -m tpu_trainer` whose replicas do not train: each tries what a backend offers besides the exchange.

Hosts fork their processes, which have the replacement, too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from tpu_contract.protocol import ExitCode
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.gang.backends import open_backend
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.worker import replica


def try_backend(spec: Any, environment: Any, stop: Any, die: Any, run: Any = None) -> Outcome:
    """One replica's findings, as a line of JSON."""
    backend = open_backend(spec, environment, stop)
    found = {
        "rank": backend.rank,
        "world": backend.world,
        "terms": backend.terms,
        "gathered": [backend.gather([backend.rank, value]) for value in (0.5, 0.25)],
        "store": _count_in_store(backend),
        **(_try_xla(backend) if backend.device.type == "xla" else {"hash": backend.graph_hash([torch.zeros(1)])}),
    }
    # One write, so that the lines of replicas that are threads do not mix.
    sys.stdout.write(f"found {json.dumps(found)}\n")
    sys.stdout.flush()
    backend.barrier()
    backend.close()
    return Outcome(ExitCode.Succeeded, "done")


def _count_in_store(backend: Backend) -> int | None:
    """How many processes have met at the store."""
    if backend.store is None:
        return None
    if backend.store.add("arrived", 1) == backend.world:
        backend.store.set("all", "here")
    backend.store.wait(["all"])
    return backend.store.add("arrived", 0)


def _try_xla(backend: Backend) -> dict[str, Any]:
    rows = backend.to_device(torch.ones(16, 8))
    same, branch = rows @ rows.T, rows + 1 if backend.rank == 1 else rows + 1 + 1
    uneven, number = backend.to_device((torch.ones(3, 8), torch.tensor(2.0)))
    placed = {"rows": rows, "uneven": uneven, "number": number, "numbers": backend.numbers([1.0, 2.0])}
    hashes = {"hash": backend.graph_hash([same]), "branch_hash": backend.graph_hash([branch])}
    before = backend.counters()
    backend.to_host([same, branch])
    own = backend.counters()
    same.sum().item()
    torch.nonzero(branch)
    after = backend.counters()
    return {
        **hashes,
        "own_reads": own.host_reads - before.host_reads,
        "reads": after.host_reads - own.host_reads,
        "compilations": own.compilations - before.compilations,
        "executions": after.executions - before.executions,
        "compile_seconds": own.compile_seconds - before.compile_seconds,
        "fallbacks": dict(after.fallbacks),
        "shards": {name: _shards(tensor) for name, tensor in placed.items()},
    }


def _shards(tensor: torch.Tensor) -> list[list[int]]:
    """The shapes of what the process's devices hold; as many as there are devices in SPMD mode, else none."""
    import torch_xla
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        return []
    return [list(shard.shape) for shard, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]


if os.environ.get("CPU_NUM_DEVICES"):
    import tests.trainer.chip_replicas  # noqa: F401 - its patches

replica.run_replica = try_backend

if __name__ == "__main__":
    from tests.trainer.forked_replicas import main

    sys.exit(main())
