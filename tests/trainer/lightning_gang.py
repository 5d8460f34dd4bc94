"""One host of a gang that trains every module of `lightning_examples` in turn: a process for each would start for
longer than it trains."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from tests.trainer.gang_processes import run_spec
from tests.trainer.lightning_examples import BATCH, EXAMPLES, SEED, SIZE
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.environment import read_environment
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import SharedStop
from tpu_trainer.worker.replica import run_replica

FOLDER, PORTS = "TEST_FOLDER", "TEST_PORTS"
"""Where the checkpoints go, in a folder for each example, and a port for each."""


def main() -> None:
    torch.set_num_threads(1)
    environment, folder = read_environment(os.environ), Path(os.environ[FOLDER])
    replicas = environment.num_hosts
    for name, port in zip(EXAMPLES, os.environ[PORTS].split(","), strict=True):
        document = run_spec(
            job={"namespace": "default", "name": "small", "uid": name, "attempt": 1},
            entrypoint="tests.trainer.lightning_examples:gang",
            parameters={"name": name},
            hosts=replicas,
            replicas=replicas,
            batch={"global": BATCH, "perReplica": BATCH // replicas},
            trainSteps=EXAMPLES[name].epochs * SIZE // BATCH,
            warmupSteps=0,
            seed=SEED,
            checkpoint={"uri": str(folder / name), "keep": 1},
        )
        here = replace(environment, master_port=int(port))
        outcome = run_replica(parse_run_spec(document), here, SharedStop(folder / "stop"), _dies)
        assert outcome.ended_well, f"{name}: {outcome.message}"
        if environment.host_index == 0:
            (folder / name / "metrics.json").write_text(json.dumps(outcome.metrics))


def _dies(outcome: Outcome) -> None:
    raise AssertionError(outcome.message)


if __name__ == "__main__":
    main()
