"""How local mode's kubelet handles deletions and kills that race with the start of a process."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deadlines import deadline
from tests.contract.jobs import stored_job
from tests.fakes.objects import delete
from tests.local.runs import DEADLINE
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.shared import env_config_map
from tpu_training_operator.domain.objects.worker_env import literal_variables
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.kube.cluster import PODS, Object
from tpu_training_operator.kube.errors import NotFound
from tpu_training_operator.local.kubelet import Kubelet
from tpu_training_operator.local.store import LocalStore
from tpu_training_operator.local.worker_process import WorkerProcess

NAME = "digits-1-0-0"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
OBEDIENT = "import signal; signal.pause()"


class SlowStart:
    """Delays every process between the decision to start it and its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        start = WorkerProcess.start

        async def held_back(*arguments: Any) -> WorkerProcess:
            self.reached.set()
            await self.go_on.wait()
            return await start(*arguments)

        monkeypatch.setattr(WorkerProcess, "start", held_back)


@pytest.fixture
def store() -> LocalStore:
    # Without the job its pods would be garbage, but the kubelet does not check their owner.
    return LocalStore()


@pytest.fixture
async def kubelet(store: LocalStore, tmp_path: Path) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet(store, tmp_path / "pods", [], tmp_path)
    yield kubelet
    kubelet.kill_all()
    await drained(kubelet)


async def drained(kubelet: Kubelet) -> None:
    async with asyncio.timeout(deadline(DEADLINE)):
        await kubelet.drain()


def worker(program: str, grace_seconds: int = 3600) -> Object:
    changes = {
        "trainer.entrypoint": ...,
        "trainer.command": ["python", "-c", program],
        "trainer.terminationGracePeriodSeconds": grace_seconds,
    }
    job = stored_job(changes)
    resolution = resolve(job.spec)
    pod = worker_pod(job, resolution, WorkerId(1, 0, 0))
    del pod["metadata"]["ownerReferences"]
    # No operator has stored the ConfigMap that the container names.
    (container,) = pod["spec"]["containers"]
    container["env"] = [*literal_variables(env_config_map(job, resolution, 1)["data"]), *container["env"]]
    return pod


async def exit_code(store: LocalStore) -> int:
    status = (await store.get(PODS, "default", NAME))["status"]
    return int(status["containerStatuses"][0]["state"]["terminated"]["exitCode"])


async def test_a_kill_reaches_processes_that_are_just_starting(
    store: LocalStore, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SlowStart(monkeypatch)
    await store.create(worker(STUBBORN))
    await start.reached.wait()
    kubelet.kill_all()
    start.go_on.set()
    await drained(kubelet)
    assert await exit_code(store) == 128 + 9


async def test_a_deletion_reaches_processes_that_are_just_starting(
    store: LocalStore, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SlowStart(monkeypatch)
    created = await store.create(worker(OBEDIENT))
    await start.reached.wait()
    await delete(store, created)
    start.go_on.set()
    await drained(kubelet)
    with pytest.raises(NotFound):
        await store.get(PODS, "default", NAME)


async def test_a_pod_that_is_deleted_before_it_has_a_node_is_never_started(store: LocalStore, kubelet: Kubelet) -> None:
    created = await store.create(worker(OBEDIENT))
    await delete(store, created)
    await drained(kubelet)
    assert not kubelet.pod_directory(NAME).path.exists()


async def test_waiting_for_the_end_can_be_cancelled(store: LocalStore, kubelet: Kubelet) -> None:
    await store.create(worker(STUBBORN))
    waiting = asyncio.create_task(kubelet.drain())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    kubelet.kill_all()
    await drained(kubelet)
    assert await exit_code(store) == 128 + 9


async def last_words(store: LocalStore) -> list[str]:
    status = (await store.get(PODS, "default", NAME))["status"]
    words: str = status["containerStatuses"][0]["state"]["terminated"]["message"]
    return words.splitlines()


async def test_a_full_disk_is_told_instead_of_what_fitted_into_the_log(
    store: LocalStore, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    await store.create(worker("import sys\nprint('half a li', end='')\nsys.exit(1)"))
    await drained(kubelet)
    (words,) = await last_words(store)
    assert words.startswith("the disk is full: ")
    assert words.endswith(str(kubelet.pod_directory(NAME).path))


async def test_the_termination_message_is_the_end_of_a_long_log(store: LocalStore, kubelet: Kubelet) -> None:
    await store.create(worker("import sys\nfor line in range(1000): print('line', line)\nsys.exit('the cause')"))
    await drained(kubelet)
    message = await last_words(store)
    assert message[-2:] == ["line 999", "the cause"]
    assert len(message) == 400
