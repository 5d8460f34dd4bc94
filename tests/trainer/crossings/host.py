"""`python -m tests.trainer.crossings.host`: a process that makes runs of many jobs, one after the other, as one of
their replicas. Leaves out those that have fewer replicas.

It ends with the first run that fails: what is left of one would be in the way of the next.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tests.trainer.crossings import task
from tests.trainer.whole_runs import Never
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.gang.backends.rendezvous import ServedStore, serve
from tpu_trainer.worker.replica import run_replica

FOLDERS = "TEST_CROSSINGS"
"""The variable with the folders of the runs, as JSON; each has a run.json."""


def main() -> int:
    folders = [Path(folder) for folder in json.loads(os.environ[FOLDERS])]
    index = int(os.environ["TPUJOB_HOST_INDEX"])
    if os.environ["TEST_CROSSINGS_WAY"] == "compile":
        _compile_without_inductor()
    if os.environ["TEST_CROSSINGS_WAY"] != "chips":
        return _all(folders, index)
    # Patches torch_xla, and finds it started.
    from tests.trainer import chip_replicas

    kept = [_store(folder) for folder in folders]
    chip_replicas.torch_xla.launch(_chip, args=(folders, [store.port for store in kept]))
    return 0


def _chip(ordinal: int, folders: list[Path], ports: list[int]) -> None:
    import torch_xla.runtime as xr

    if code := _all(folders, xr.local_ordinal(), ports):
        os._exit(code)


def _all(folders: list[Path], place: int, ports: list[int] | None = None) -> int:
    """Makes the runs as replica `place`. `ports`: of the stores where the replicas of one host meet."""
    for number, folder in enumerate(folders):
        spec = json.loads((folder / "run.json").read_bytes())
        hosts = spec["slice"]["hosts"]
        if ports is None and place >= hosts:
            continue
        port = ports[number] if ports else int((folder / "port").read_text())
        own = {"host_index": 0, "local_rank": place} if ports else {"host_index": place}
        where = WorkerEnvironment(
            run_spec=folder / "run.json",
            num_hosts=hosts,
            master_addr="127.0.0.1",
            master_port=port,
            report_directory=folder if place == 0 else None,
            hang_seconds=120.0,
            **own,
        )
        print(f"--- {folder}", flush=True)
        outcome = _one(spec, where, folder / f"outcome-{place}.json")
        if not outcome.ended_well:
            return outcome.code
        if place == 0:
            _set_aside(folder)
        if os.environ["TEST_CROSSINGS_WAY"] == "compile":
            import torch

            torch._dynamo.reset()
    return 0


def _set_aside(folder: Path) -> None:
    """Keeps the last checkpoint for the test, and leaves those from which the job's next run may continue."""
    parent = Path(json.loads((folder / "run.json").read_bytes())["checkpoint"]["uri"])
    *others, last = sorted(parent.glob("step-*"))
    last.rename(folder / "last")
    for other in others:
        if int(other.name.split("-")[1]) > int((folder / "saved").read_text()):
            shutil.rmtree(other)


def _one(spec: dict[str, Any], where: WorkerEnvironment, result: Path) -> Outcome:
    def die(outcome: Outcome) -> NoReturn:
        _leave(outcome, result)
        os._exit(outcome.code)

    outcome = run_replica(parse_run_spec(spec), where, Never(), die)  # type: ignore[arg-type]
    _leave(outcome, result)
    return outcome


def _leave(outcome: Outcome, result: Path) -> None:
    seen = getattr(task.RATES, "seen", {})
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({**asdict(outcome), "code": outcome.code.name, "rates": seen}))
    unfinished.rename(result)


def _store(folder: Path) -> ServedStore:
    spec = parse_run_spec(json.loads((folder / "run.json").read_bytes()))
    where = WorkerEnvironment(folder / "run.json", 0, 1, "127.0.0.1", 0, None)
    return serve(where, spec.job.gang, spec.slice.replicas)


def _compile_without_inductor() -> None:
    """Has torch.compile make its programs and their guards, but not build them: inductor's are in `test_compiled`, and
    each takes seconds. An update has no gradients to trace."""
    import torch

    plain = torch.compile
    backends = {"compiled_loss": "aot_eager_default_partitioner"}
    torch.compile = lambda function, backend, **named: plain(
        function, backend=backends.get(function.__name__, "eager"), **named
    )


if __name__ == "__main__":
    sys.exit(main())
