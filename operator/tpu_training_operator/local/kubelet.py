"""The kubelet of this machine, which runs every pod of the store as a process and reports its status.

The image is not used: the container's command runs here, with its ConfigMaps written to files. The pod's log,
termination message and progress stay in its directory.
"""

import asyncio
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tpu_contract import protocol
from tpu_training_operator.api.constants import (
    CODE_COMMAND,
    CONTAINER_NAME,
    FAST_SLICE_CHECK_COMMAND,
    LABEL_ATTEMPT,
    LABEL_JOB_NAME,
    TERMINATION_LOG,
)
from tpu_training_operator.kube.cluster import CONFIG_MAPS, PODS, Object
from tpu_training_operator.local.container_env import container_env, expand
from tpu_training_operator.local.forks import Forks, gains
from tpu_training_operator.local.outages import Outage, Outages
from tpu_training_operator.local.store import LocalStore
from tpu_training_operator.local.worker_process import WorkerProcess

_NODE = "this-machine"
# What containerd answers when the command does not exist.
_CANNOT_START = 128
_LONGEST_MESSAGE = 4096
_LOOK_FOR_NODES_SECONDS = 0.2
_IMPORTS = "torch is imported once for these hosts"
# A kubelet keeps 80 lines, which torchrun's closing lines alone may fill; the cause is above them.
_LOG_TAIL_LINES = 400
_LONGEST_TAIL = 64 * 1024


@dataclass(frozen=True)
class PodDirectory:
    """The directory of a pod's files."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def termination(self) -> Path:
        return self.path / "termination.json"

    def read_termination(self) -> str:
        """Returns the termination message; empty without one."""
        if not self.termination.exists():
            return ""
        return self.termination.read_text(encoding="utf-8", errors="replace")[:_LONGEST_MESSAGE]


class Kubelet:
    """Runs the pods of `store` under `directory`. Entrypoints are imported from `python_path`; worker 0 leaves its
    report in `report_directory`. `outages`: slices that are lost for a while."""

    def __init__(
        self,
        store: LocalStore,
        directory: Path,
        python_path: Sequence[Path],
        report_directory: Path,
        outages: Outages | None = None,
    ) -> None:
        self._outages = outages or Outages()
        self._placed: dict[str, Object] = {}
        self._losses = [asyncio.create_task(self._lose(*loss)) for loss in self._outages.beginnings()]
        self._store = store
        self._directory = directory
        self._report_directory = report_directory
        self._python_path = python_path
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._doomed: set[str] = set()
        self._kill_at_once = False
        self._ports: dict[tuple[str, str], int] = {}
        self._forks = Forks()
        store.subscribe(self._on_change)

    def pod_directory(self, pod_name: str) -> PodDirectory:
        return PodDirectory(self._directory / pod_name)

    async def drain(self) -> None:
        """Waits until every process has ended. Cancelling the wait does not affect the processes."""
        # asyncio.gather would cancel the tasks along with its caller.
        while running := [t for t in (*self._tasks.values(), *self._stopping.values()) if not t.done()]:
            await asyncio.wait(running)

    def kill_all(self) -> None:
        """Ends every process now, without a grace period, including those that are just starting."""
        self._kill_at_once = True
        self._forks.give_up()
        for process in self._processes.values():
            process.kill()

    async def close(self) -> None:
        """Ends the fork server and pending losses; called after the last process has ended."""
        for loss in self._losses:
            loss.cancel()
        await self._forks.close()

    def _on_change(self, body: Object) -> None:
        if body["kind"] != PODS.kind:
            return
        uid = body["metadata"]["uid"]
        if "deletionTimestamp" in body["metadata"]:
            self._doomed.add(uid)
            if _is_placeholder(body):
                self._store.remove_pod(body)
            else:
                self._stop(body)
        elif "nodeName" not in body["spec"] and uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._run(body))

    def _stop(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        process = self._processes.get(uid)
        if process is None:
            self._forks.give_up()
        elif uid not in self._stopping:
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            self._stopping[uid] = asyncio.create_task(process.stop(grace))

    async def _run(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        while self._store.has_pod(pod) and not self._outages.has_nodes_for(pod):  # noqa: ASYNC110 - outages follow a clock
            await asyncio.sleep(_LOOK_FOR_NODES_SECONDS)
        if self._store.bind(pod, _NODE):
            self._placed[uid] = pod
            # A placeholder needs no process.
            status = _running_status(_now()) if _is_placeholder(pod) else await self._run_to_its_end(pod)
            self._store.set_pod_status(pod, status)
        self._processes.pop(uid, None)
        if uid in self._doomed:
            self._store.remove_pod(pod)
        del self._tasks[uid]

    async def _lose(self, seconds: float, outage: Outage) -> None:
        """Kills the slice's workers when the outage begins, without a warning."""
        await asyncio.sleep(seconds)
        for uid, process in self._processes.items():
            if uid in self._placed and outage.takes(self._placed[uid]):
                process.kill()

    async def _run_to_its_end(self, pod: Object) -> Object:
        """Runs the container; returns the pod's final status."""
        uid, started = pod["metadata"]["uid"], _now()
        files = self.pod_directory(pod["metadata"]["name"])
        try:
            files.path.mkdir(parents=True, exist_ok=True)
            process = await self._start(pod, files)
        except (OSError, ValueError) as error:
            # ValueError: an argument or a variable contains a NUL character.
            return _final_status(_CANNOT_START, "StartError", str(error), started)
        self._processes[uid] = process
        if self._kill_at_once:
            process.kill()
        elif uid in self._doomed:
            self._stop(pod)
        else:
            self._store.set_pod_status(pod, _running_status(started))
        code = await process.wait()
        return _final_status(code, "Completed" if code == 0 else "Error", _last_words(files, code), started)

    async def _start(self, pod: Object, files: PodDirectory) -> WorkerProcess:
        container = pod["spec"]["containers"][0]
        stored = await self._store.list(CONFIG_MAPS, pod["metadata"]["namespace"])
        config_maps = {config_map["metadata"]["name"]: config_map["data"] for config_map in stored}
        directories = self._mount(pod, config_maps, files.path) | {TERMINATION_LOG: str(files.termination)}
        env = container_env(pod, config_maps, directories, self._rendezvous_port(pod))
        if env[protocol.ENV_HOST_INDEX] == "0":
            env[protocol.ENV_REPORT_DIRECTORY] = str(self._report_directory)
            # The shell's proxy cannot reach the progress service on this machine.
            direct = env.get("no_proxy") or env.get("NO_PROXY")
            env["no_proxy"] = ",".join(filter(None, [direct, "localhost"]))
        env["PYTHONPATH"] = ":".join([*map(str, self._python_path), *filter(None, [env.get("PYTHONPATH")])])
        env["PYTHONUNBUFFERED"] = "1"
        command = [expand(part, env) for part in (*container["command"], *container.get("args", ()))]
        if gains(command, env):
            waiting = {"waiting": {"reason": "Importing", "message": _IMPORTS}}
            self._store.set_pod_status(pod, _status("Pending", waiting, ready=False))
        if (forked := await self._forks.fork(command, env, files.log)) is not None:
            return forked
        places = [0]
        for wrapper in (FAST_SLICE_CHECK_COMMAND, CODE_COMMAND):
            if command[places[-1] : places[-1] + len(wrapper)] == wrapper:
                places.append(places[-1] + len(wrapper))
        for place in places:
            if command[place : place + 1] in (["python"], ["python3"]):
                command[place] = sys.executable
        return await WorkerProcess.start(command, env, files.log)

    def _mount(self, pod: Object, config_maps: dict[str, dict[str, str]], directory: Path) -> dict[str, str]:
        """Writes the pod's volumes below `directory`; returns the place of each mount path."""
        volumes: dict[str, Path] = {}
        for volume in pod["spec"].get("volumes", ()):
            files = self._files(volume, pod, config_maps)
            if files is None:
                continue
            place = volumes[volume["name"]] = directory / "volumes" / volume["name"]
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(text, encoding="utf-8")
        mounts = pod["spec"]["containers"][0].get("volumeMounts", ())
        return {mount["mountPath"]: str(volumes[mount["name"]]) for mount in mounts if mount["name"] in volumes}

    def _files(self, volume: Object, pod: Object, config_maps: dict[str, dict[str, str]]) -> dict[str, str] | None:
        """Returns the volume's files, by path; None for kinds that need a cluster and are left out."""
        if "emptyDir" in volume:
            return {}
        if "configMap" in volume:
            return _items(volume["configMap"], config_maps)
        if "projected" not in volume:
            return None
        files: dict[str, str] = {}
        for source in volume["projected"]["sources"]:
            if token := source.get("serviceAccountToken"):
                files[token["path"]] = self._store.issue_token(pod, token.get("audience", ""))
            elif "configMap" in source:
                files |= _items(source["configMap"], config_maps)
        return files

    def _rendezvous_port(self, pod: Object) -> int:
        """Returns a free port for an attempt's workers: the usual one may be taken, even by the previous attempt."""
        labels = pod["metadata"]["labels"]
        attempt = (labels[LABEL_JOB_NAME], labels.get(LABEL_ATTEMPT, ""))
        if attempt not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[attempt] = probe.getsockname()[1]
        return self._ports[attempt]


def _is_placeholder(pod: Object) -> bool:
    return bool(pod["metadata"]["labels"].get("app.kubernetes.io/component") == "placeholder")


def _items(source: Object, config_maps: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns the files of a ConfigMap, by path."""
    data = config_maps.get(source["name"], {})
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    return {item["path"]: data[item["key"]] for item in items if item["key"] in data}


def _final_status(code: int, reason: str, message: str, started: str) -> Object:
    terminated = {"exitCode": code, "reason": reason, "message": message, "startedAt": started, "finishedAt": _now()}
    return _status("Succeeded" if code == 0 else "Failed", {"terminated": terminated}, ready=False)


def _running_status(started: str) -> Object:
    return _status("Running", {"running": {"startedAt": started}}, ready=True)


def _status(phase: str, state: Object, *, ready: bool) -> Object:
    return {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{"name": CONTAINER_NAME, "ready": ready, "restartCount": 0, "state": state}],
    }


def _last_words(files: PodDirectory, code: int) -> str:
    """Returns the termination message, or the end of the log for a failure without one."""
    if words := files.read_termination():
        return words
    # With a full disk, a worker opens its message and cannot write it, and the end of the log is not what it printed.
    if (code or files.termination.exists()) and shutil.disk_usage(files.path).free < _LONGEST_MESSAGE:
        return f"the disk is full: the worker could write neither its log nor its last words in {files.path}"
    if code == 0 or not files.log.exists():
        return ""
    lines = files.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])[-_LONGEST_TAIL:]


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
