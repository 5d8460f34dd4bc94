"""What local mode gives a worker process that a pod would get from its cluster."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.jobs import job_body
from tests.local.runs import Run, Runs
from tpu_trainer.contract.environment import read_run_spec

Environ = dict[str, str]


def environments(run: Run, hosts: int) -> list[Environ]:
    """The environments of all workers of a successful run."""
    assert run.wait() == 0, run.stdout + run.stderr
    return [run.told("started", host)["env"] for host in range(hosts)]


def of_all(environs: list[Environ], name: str) -> list[str]:
    return [environ[name] for environ in environs]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """For runs of which several tests read something."""
    started = Runs(tmp_path_factory.mktemp("shared"))
    yield started
    started.reap()


MEET = """
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if HOST == 0:
    with socket.create_server(address) as server:
        guests = [server.accept()[0] for _ in range(3)]
        tell("guests", sorted(guest.recv(1).decode() for guest in guests))
        for guest in guests: guest.close()
else:
    while True:
        try:
            with socket.create_connection(address) as connection:
                connection.sendall(str(HOST).encode())
                connection.recv(1)
                break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def four_hosts(shared: Runs) -> Run:
    return shared.start(MEET, hosts=4, name="four-hosts")


def test_all_hosts_are_this_machine(four_hosts: Run) -> None:
    environs = environments(four_hosts, hosts=4)
    assert of_all(environs, "MASTER_ADDR") == ["127.0.0.1"] * 4
    assert of_all(environs, "TPU_WORKER_HOSTNAMES") == ["127.0.0.1,127.0.0.1,127.0.0.1,127.0.0.1"] * 4
    assert of_all(environs, "PJRT_DEVICE") == ["CPU"] * 4


def test_the_workers_meet_at_the_rendezvous(four_hosts: Run) -> None:
    environments(four_hosts, hosts=4)
    assert four_hosts.told("guests") == ["1", "2", "3"]


def test_worker_0_alone_reports_progress(four_hosts: Run) -> None:
    environs = environments(four_hosts, hosts=4)
    expected = [str(four_hosts.out), None, None, None]
    assert [environ.get("TPUJOB_REPORT_DIRECTORY") for environ in environs] == expected


def test_four_workers_share_the_cores(four_hosts: Run) -> None:
    share = max(1, (os.cpu_count() or 1) // 4)
    assert of_all(environments(four_hosts, hosts=4), "OMP_NUM_THREADS") == [str(share)] * 4


@pytest.fixture(scope="module")
def one_host(shared: Runs) -> Environ:
    changes = {
        "trainer.sharedMemory": "1Gi",
        "trainer.env": [{"name": "CACHE", "value": "/dev/shm/cache"}],
        "checkpoint": {"uri": "/tmp/checkpoints"},
        "recipe.parameters": {"drop-out": "0.1", "text": "$(HOME) costs $$5"},
    }
    (environ,) = environments(shared.start("", changes, name="one-host"), hosts=1)
    return environ


def test_one_worker_has_all_cores(one_host: Environ) -> None:
    assert one_host["OMP_NUM_THREADS"] == str(os.cpu_count() or 1)


def test_shared_memory_is_this_machines(one_host: Environ) -> None:
    assert one_host["CACHE"] == "/dev/shm/cache"


def test_a_users_own_loop_gets_checkpoints_and_parameters(one_host: Environ) -> None:
    assert one_host["TPUJOB_CHECKPOINT_URI"].startswith("/tmp/checkpoints/default/")
    assert one_host["TPUJOB_PARAMETER_DROP_OUT"] == "0.1"
    assert one_host["TPUJOB_PARAMETER_TEXT"] == "$(HOME) costs $$5"


def test_torchrun_finds_all_hosts_without_an_argument(runs: Runs) -> None:
    environs = environments(runs.start("", {"trainer.backend": "Torch"}, hosts=2), hosts=2)
    (meeting,) = {(environ["PET_MASTER_ADDR"], environ["PET_MASTER_PORT"]) for environ in environs}
    assert meeting == (environs[0]["MASTER_ADDR"], environs[0]["MASTER_PORT"]) == ("127.0.0.1", meeting[1])
    assert [(environ["PET_NODE_RANK"], environ["PET_NNODES"]) for environ in environs] == [("0", "2"), ("1", "2")]
    assert [(environ["RANK"], environ["WORLD_SIZE"]) for environ in environs] == [("0", "2"), ("1", "2")]


def test_the_shells_home_user_and_thread_count_win(runs: Runs, tmp_path: Path) -> None:
    shell = {"HOME": str(tmp_path), "USER": "ada", "OMP_NUM_THREADS": "7"}
    (environ,) = environments(runs.start("", environ=shell), hosts=1)
    assert {name: environ[name] for name in shell} == shell


def test_the_variables_and_arguments_of_the_job_refer_to_ours(runs: Runs) -> None:
    changes = {
        "trainer.env": [
            {"name": "HOME", "value": "/home/of-the-job"},
            {"name": "RANK", "value": "$(TPUJOB_HOST_INDEX)"},
            {"name": "MEETING", "value": "tcp://$(MASTER_ADDR):$(MASTER_PORT)"},
            {"name": "LATER", "value": "$(RANK) of $(TPUJOB_NUM_HOSTS), $(UNKNOWN), $$(RANK)"},
        ],
        "trainer.args": ["--rank=$(TPUJOB_HOST_INDEX)", "$$(HOME)"],
    }
    run = runs.start("tell('arguments', sys.argv[1:])", changes, hosts=2)
    environs = environments(run, hosts=2)
    assert of_all(environs, "HOME") == ["/home/of-the-job"] * 2
    assert of_all(environs, "RANK") == ["0", "1"]
    assert of_all(environs, "MEETING") == [f"tcp://127.0.0.1:{environ['MASTER_PORT']}" for environ in environs]
    assert of_all(environs, "LATER") == ["0 of 2, $(UNKNOWN), $(RANK)", "1 of 2, $(UNKNOWN), $(RANK)"]
    assert [run.told("arguments", host) for host in range(2)] == [[f"--rank={host}", "$(HOME)"] for host in range(2)]


def test_an_empty_dir_starts_empty_and_is_private_to_its_pod(runs: Runs) -> None:
    changes = {
        "trainer.volumes": [{"name": "scratch", "emptyDir": {}}],
        "trainer.volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "trainer.env": [{"name": "SCRATCH", "value": "/scratch"}],
    }
    script = """
scratch = pathlib.Path(os.environ["SCRATCH"])
tell("found", [path.name for path in scratch.iterdir()])
(scratch / "mine").touch()
"""
    for _ in range(2):
        run = runs.start(script, changes, hosts=2, arguments=["--output-dir", "out", "--overwrite"])
        environs = environments(run, hosts=2)
        assert len(set(of_all(environs, "SCRATCH"))) == 2
        assert [run.told("found", host) for host in range(2)] == [[], []]


STAND_IN_FOR_THE_TRAINER = """
import json, os, pathlib
host = os.environ["TPUJOB_HOST_INDEX"]
unfinished = pathlib.Path(f"told.started.1.{host}.unfinished")
unfinished.write_text(json.dumps({"env": dict(os.environ)}))
unfinished.rename(unfinished.with_suffix(".json"))
pathlib.Path(os.environ["TPUJOB_TERMINATION_LOG"]).write_text('{"outcome": "Succeeded"}')
"""


def test_an_entrypoint_is_run_by_the_trainer_with_a_run_spec(runs: Runs, tmp_path: Path) -> None:
    package = tmp_path / "tpu_trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN_FOR_THE_TRAINER)
    (tmp_path / "tasks.py").write_text("def digits(hyperparameters): ...\n")
    body = job_body({"slice.acceleratorType": "v5litepod-8", "trainer.entrypoint": "tasks:digits"})
    environs = environments(runs.start_job(tmp_path, body), hosts=2)
    specs = [read_run_spec(Path(environ["TPUJOB_RUN_SPEC"])) for environ in environs]
    assert specs[0] == specs[1]
    assert (specs[0].entrypoint, specs[0].hardware, specs[0].job.attempt) == ("tasks:digits", "CPU", 1)
    assert (specs[0].slice.hosts, specs[0].slice.replicas, specs[0].batch.total) == (2, 8, 128)
    for environ in environs:
        assert environ["PYTHONPATH"].split(":")[0] == str(tmp_path)
    json.loads((tmp_path / "out" / "result.json").read_text())
