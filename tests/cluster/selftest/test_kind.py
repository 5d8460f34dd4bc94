"""What is asked of kind and of the engine below it. The programs are fakes that record their command lines."""

import stat
from pathlib import Path

import pytest
import yaml

from tests.cluster import binaries, kind
from tests.cluster.cluster import make
from tests.cluster.nodes import RealCluster

RECORDS = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$*" in *"route show default"*) echo "default via 172.18.0.1 dev eth0" ;; *"tasks list"*) cat {tasks} ;; esac
case "$*" in *"{fails}"*) echo "no such image" >&2; exit 1 ;; esac
"""
TASKS = "TASK    PID    STATUS\naaa     1    RUNNING\nbbb     2    STOPPED\n"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_programs(tmp_path, monkeypatch, fails="nothing")


def fake_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> Path:
    folder, log, tasks = tmp_path / "programs", tmp_path / "log", tmp_path / "tasks"
    folder.mkdir()
    tasks.write_text(TASKS)
    for name in ("kind", "docker"):
        program = folder / name
        program.write_text(RECORDS.format(log=log, tasks=tasks, fails=fails))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("KIND_EXPERIMENTAL_PROVIDER", kind.IMAGE_SETTING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(binaries, "ensure", lambda *names: {name: folder / name for name in names})
    return log


@pytest.fixture
def cluster(log: Path) -> kind.KindCluster:
    found = kind.KindCluster()
    found.nodes = ("x-worker", "x-worker2")
    return found


def test_every_worker_sees_the_shared_folders_and_reports_as_often_as_our_own_nodes() -> None:
    found = kind.configuration(2, (Path("/venv"),))
    assert [node["role"] for node in found["nodes"]] == ["control-plane", "worker", "worker"]
    mount = {"hostPath": "/venv", "containerPath": "/venv", "readOnly": True}
    assert [node.get("extraMounts") for node in found["nodes"]] == [None, [mount], [mount]]
    [kubelet] = map(yaml.safe_load, found["kubeadmConfigPatches"])
    assert kubelet["nodeLeaseDurationSeconds"] == 8


def test_nodes_are_hurt_and_healed_through_the_engine(cluster: kind.KindCluster, log: Path) -> None:
    cluster.stop_kubelet("x-worker")
    cluster.kill_host("x-worker2")
    assert cluster.running_containers("x-worker") == {"aaa"}
    assert cluster.address == "172.18.0.1"
    cluster.load_image(Path("/images/x.tar"))
    assert log.read_text().splitlines() == [
        "docker exec x-worker systemctl stop kubelet",
        "docker kill x-worker2",
        "docker exec x-worker ctr --namespace=k8s.io tasks list",
        "docker exec x-worker ip route show default",
        f"kind load image-archive /images/x.tar --name={kind.NAME} --nodes=x-worker,x-worker2",
    ]


def test_a_failed_start_says_why_and_leaves_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_programs(tmp_path, monkeypatch, fails="create cluster")
    monkeypatch.setenv(kind.IMAGE_SETTING, "mirror/node:v1")
    cluster = kind.KindCluster()
    with pytest.raises(kind.KindError, match=r"kind create cluster .*--image=mirror/node:v1.*: no such image"):
        cluster.start()
    assert [line.split()[:3] for line in log.read_text().splitlines()] == [
        ["kind", verb, "cluster"] for verb in ("delete", "create", "delete")
    ]
    assert not cluster.directory.exists()


def test_the_setting_chooses_the_backend(log: Path) -> None:
    assert isinstance(make("own", 2, ()), RealCluster)
    assert isinstance(make("kind", 2, ()), kind.KindCluster)
    with pytest.raises(ValueError, match="TEST_CLUSTER is 'minikube'; own and kind are known"):
        make("minikube", 2, ())
