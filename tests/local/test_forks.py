"""Workers that are forked from one process with the imports: like those that the real command starts, and never left
behind. The trainer is a stand-in, whose imports take no time and tell who has made them."""

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deadlines import deadline
from tests.cluster.processes import wait_until
from tests.contract.jobs import job_body
from tests.local.runs import DEADLINE, Run, Runs
from tpu_training_operator.api.constants import TRAINER_COMMAND
from tpu_training_operator.local.forks import Forks
from tpu_training_operator.local.worker_process import WorkerProcess

IMPORTS = """
import os
IMPORTER = os.getpid()
print("printed by the imports")
"""
TELLS = """
import json, os, pathlib, signal, subprocess, sys
from tpu_trainer.worker.replica import IMPORTER
host = os.environ["TPUJOB_HOST_INDEX"]
facts = {
    "pid": os.getpid(),
    "importer": IMPORTER,
    "env": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("TPUJOB_", "MASTER_", "MY_"))},
    "cwd": os.getcwd(),
    "path": sys.path,
    "session": os.getsid(0) == os.getpid(),
    "main": sys.modules["__main__"].__spec__.name,
}
unfinished = pathlib.Path(f"told.started.1.{host}.unfinished")
"""
LEAVES = 'unfinished.write_text(json.dumps(facts)); unfinished.rename(unfinished.with_suffix(".json"))\n'
WITH_A_CHILD = 'facts["child"] = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid\n'
RESTS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()\n"


def stand_in(directory: Path, main: str, imports: str = IMPORTS) -> None:
    """A package that is imported and run in the trainer's place."""
    for folder in ("gang/backends", "worker"):
        (directory / "tpu_trainer" / folder).mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "worker/__init__": "",
        "worker/replica": imports,
        "__main__": main,
        "gang/__init__": "",
        "gang/backends/__init__": "",
        "gang/backends/xla": "",
    }.items():
        (directory / "tpu_trainer" / f"{name}.py").write_text(text)


@dataclass(frozen=True)
class Hosts:
    """Starts the hosts of a gang as the kubelet does."""

    forks: Forks
    directory: Path

    async def fork(self, host: int, hosts: int = 4, **more: str) -> WorkerProcess | None:
        env = {**self.env(host, hosts), **more}
        return await self.forks.fork(TRAINER_COMMAND, env, self.log(host))

    def env(self, host: int, hosts: int = 4) -> dict[str, str]:
        places = {"TPUJOB_NUM_HOSTS": str(hosts), "TPUJOB_HOST_INDEX": str(host), "MASTER_PORT": "1"}
        run_spec = {"TPUJOB_RUN_SPEC": str(self.directory / "run.json"), "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **places, **run_spec, "PYTHONPATH": str(self.directory)}

    def log(self, host: int) -> Path:
        return self.directory / f"log-{host}.txt"

    def told(self, host: int) -> Any:
        return json.loads((self.directory / f"told.started.1.{host}.json").read_text())


@pytest.fixture
async def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hosts]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text('{"backend": "xla"}')
    forks = Forks()
    yield Hosts(forks, tmp_path)
    await forks.close()


async def code(process: WorkerProcess | None) -> int:
    assert process is not None
    async with asyncio.timeout(deadline(DEADLINE)):
        return await process.wait()


async def test_forked_workers_share_imports_and_nothing_else(hosts: Hosts, tmp_path: Path) -> None:
    stand_in(tmp_path, TELLS + LEAVES + 'print("host", host, flush=True)\n')
    for host in (1, 2):
        assert await code(await hosts.fork(host)) == 0
    started = await WorkerProcess.start([sys.executable, *TRAINER_COMMAND[1:]], hosts.env(3), hosts.log(3))
    assert await code(started) == 0

    one, two, real = map(hosts.told, (1, 2, 3))
    assert one["importer"] == two["importer"] != real["importer"]
    assert len({facts["pid"] for facts in (one, two, real)}) == 3
    assert one["env"]["TPUJOB_HOST_INDEX"] == "1"
    for facts in (one, two):
        assert {**facts, "pid": 0, "importer": 0} == {
            **real,
            "pid": 0,
            "importer": 0,
            "env": {**real["env"], "TPUJOB_HOST_INDEX": facts["env"]["TPUJOB_HOST_INDEX"]},
        }
    for host in (1, 2, 3):
        assert hosts.log(host).read_text().splitlines() == ["printed by the imports", f"host {host}"]


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("import sys; sys.exit(75)", 75),
        ("raise SystemExit('told')", 1),
        ("import os; os._exit(69)", 69),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11),
    ],
)
async def test_a_forked_worker_has_its_own_exit_code(hosts: Hosts, tmp_path: Path, main: str, expected: int) -> None:
    stand_in(tmp_path, main)
    assert await code(await hosts.fork(1)) == expected


async def test_a_forked_worker_is_stopped_and_killed_with_its_children(hosts: Hosts, tmp_path: Path) -> None:
    stand_in(tmp_path, TELLS + WITH_A_CHILD + RESTS.replace("signal.pause()", LEAVES + "signal.pause()"))
    process = await hosts.fork(1)
    assert process is not None
    told = tmp_path / "told.started.1.1.json"
    await asyncio.to_thread(wait_until, told.exists, timeout=DEADLINE, what="the worker tells its pid")
    with survivors_of(hosts.told(1), "pid", "child") as survivors:
        await process.stop(grace_seconds=0.1)
        assert await code(process) == 128 + 9
        assert survivors() == []


@pytest.mark.parametrize(
    ("host", "hosts_", "more"),
    [(0, 4, {}), (1, 2, {}), (1, 4, {"MY_RANK": "1"})],
    ids=["host 0", "two hosts", "another environment"],
)
async def test_these_are_started(hosts: Hosts, tmp_path: Path, host: int, hosts_: int, more: Mapping[str, str]) -> None:
    stand_in(tmp_path, "")
    assert await code(await hosts.fork(2)) == 0
    assert await hosts.fork(host, hosts_, **more) is None


@pytest.mark.parametrize(
    "imports",
    [
        "import nothing_of_this_name",
        "import threading, time; threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
        "import os; os._exit(0)",
    ],
    ids=["that fail", "that start a thread", "that end the process"],
)
async def test_imports_that_cannot_be_shared_are_left_to_the_workers(
    hosts: Hosts, tmp_path: Path, imports: str
) -> None:
    stand_in(tmp_path, "", imports)
    assert [await hosts.fork(host) for host in (1, 2, 3)] == [None, None, None]


async def test_who_waits_for_the_imports_need_not_wait_for_their_end(hosts: Hosts, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "imports")
    stand_in(tmp_path, "", "open('imports', 'w').close(); import signal; signal.pause()")
    waiting = asyncio.create_task(hosts.fork(1))
    await asyncio.to_thread((tmp_path / "imports").read_bytes)
    hosts.forks.give_up()
    async with asyncio.timeout(deadline(DEADLINE)):
        assert await waiting is None
    assert await hosts.fork(1) is None


async def test_what_has_been_forked_can_stop_in_order(hosts: Hosts, tmp_path: Path) -> None:
    stand_in(tmp_path, "import time; time.sleep(0.1)")
    process = await hosts.fork(1)
    hosts.forks.give_up()
    assert await code(process) == 0


async def test_a_server_that_is_given_up_while_it_starts_is_not_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    stand_in(tmp_path, "", "import signal; signal.pause()")
    waiting = asyncio.create_task(hosts.fork(1))
    await asyncio.sleep(0)
    assert hosts.forks._turn.locked()
    hosts.forks.give_up()
    async with asyncio.timeout(deadline(DEADLINE)):
        assert await waiting is None


def forked(runs: Runs, directory: Path, main: str, imports: str = IMPORTS) -> Run:
    """A `tpujob run` whose four hosts run the stand-in."""
    stand_in(directory, main, imports)
    (directory / "tasks.py").write_text("def digits(hyperparameters): ...\n")
    changes = {
        "slice.acceleratorType": "v5litepod-16",
        "trainer.entrypoint": "tasks:digits",
        "trainer.terminationGracePeriodSeconds": 3600,
    }
    return runs.start_job(directory, job_body(changes))


def test_a_killed_run_leaves_no_forked_worker_behind(runs: Runs, tmp_path: Path) -> None:
    run = forked(runs, tmp_path, TELLS + RESTS.replace("signal.pause()", LEAVES + "signal.pause()"))
    facts = [run.told("started", host) for host in range(4)]
    assert len({told["importer"] for told in facts}) == 2
    with contextlib.ExitStack() as stack:
        all_survivors = [stack.enter_context(survivors_of(told, "pid", "importer")) for told in facts]
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
        assert [name for survivors in all_survivors for name in survivors()] == []


def test_an_interrupt_does_not_wait_for_the_imports(runs: Runs, tmp_path: Path) -> None:
    blocks = """
import os, pathlib, signal
pathlib.Path(f"told.importing.1.{os.environ['TPUJOB_HOST_INDEX']}.json").write_text(str(os.getpid()))
signal.pause()
"""
    run = forked(runs, tmp_path, "import tpu_trainer.worker.replica", blocks)
    run.told("importing", 0)
    run.interrupt()
    assert run.wait() == 130
    assert run.result()["state"] == "Cancelled"


@contextlib.contextmanager
def survivors_of(told: Mapping[str, Any], *names: str) -> Iterator[Callable[[], list[str]]]:
    """Yields a function that waits for the end of the processes that a worker has told of, and says which are left."""
    family = {name: os.pidfd_open(told[name]) for name in names}

    def left() -> list[str]:
        return [name for name, pidfd in family.items() if not select.select([pidfd], [], [], deadline(DEADLINE))[0]]

    try:
        yield left
    finally:
        for pidfd in family.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
