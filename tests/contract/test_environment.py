"""The environment of a worker: the operator sets what the trainer reads, and nobody else can set it."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract.device_plugin import SHAPE_OF_DYNAMIC_SLICE
from tests.contract.jobs import KINDS_OF_JOBS, stored_job
from tests.contract.pods import ATTEMPT, REPORTING, worker_environments
from tpu_contract import protocol
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.environment import check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.errors import BadSpecError
from tpu_training_operator.api.constants import ENV_PREFIX, RESERVED_ENV
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.domain.objects.worker_pod import worker_pod

kinds_of_jobs = pytest.mark.parametrize("changes", KINDS_OF_JOBS.values(), ids=KINDS_OF_JOBS.keys())

OWN_LOOP = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}

PROCESSES = "PET_NPROC_PER_NODE"
PROCESS_BATCH = "TPUJOB_PER_PROCESS_BATCH_SIZE"
# A value that the user gives for one of these wins.
OVERRIDABLE = {
    "HOME",
    "USER",
    PROCESSES,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NODE_RANK",
    "TORCH_TPU_TOPOLOGY",
    "TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S",
    *SHAPE_OF_DYNAMIC_SLICE,
}
MULTISLICE_JOB = KINDS_OF_JOBS["multislice"]


def test_every_variable_that_the_trainer_knows_is_set() -> None:
    known = {value for name, value in vars(protocol).items() if name.startswith("ENV_")}
    (first, *_) = worker_environments(stored_job(KINDS_OF_JOBS["code in a Secret"]), REPORTING)
    # Only local mode can read files from the worker's disk. Images set the hang limit. No worker compiles beforehand.
    # The worker tells its own processes which packages it has added; where from is told if not from an index.
    packages = {protocol.ENV_PACKAGES, protocol.ENV_PACKAGES_SHA256}
    rest = {protocol.ENV_REPORT_DIRECTORY, protocol.ENV_HANG_SECONDS, protocol.ENV_COMPILE_SECONDS} | packages
    assert known - first.keys() == rest


def set_by_torch_xla() -> set[str]:
    """The variables that torch_xla defaults per process when it opens the chips; read from its source."""
    package = importlib.util.find_spec("torch_xla")
    source = (Path(package.submodule_search_locations[0]) / "_internal" / "tpu.py").read_text(encoding="utf-8")
    return set(re.findall(r"environ\.setdefault\(\s*xenv\.(\w+)", source))


def test_the_variables_that_torch_xla_sets_per_process_are_known() -> None:
    assert set_by_torch_xla() == {
        "CLOUD_TPU_TASK_ID",
        "TPU_CHIPS_PER_PROCESS_BOUNDS",
        "TPU_PROCESS_ADDRESSES",
        "TPU_PROCESS_BOUNDS",
        "TPU_PROCESS_PORT",
        "TPU_VISIBLE_CHIPS",
    }


@kinds_of_jobs
def test_the_operator_does_not_set_what_torch_xla_sets(changes: Mapping[str, Any]) -> None:
    (first, *_) = worker_environments(stored_job(changes))
    assert not first.keys() & (set_by_torch_xla() | {"TPU_SKIP_MDS_QUERY"})


def test_users_cannot_set_what_torch_xla_sets() -> None:
    assert set_by_torch_xla() <= set(RESERVED_ENV)


@kinds_of_jobs
@pytest.mark.parametrize("loop", [{}, OWN_LOOP], ids=["an entrypoint", "own loop"])
def test_users_cannot_set_what_the_operator_sets(changes: Mapping[str, Any], loop: dict[str, Any]) -> None:
    both = {**changes, **({} if {"report", "trainer.loop"} & changes.keys() else loop)}
    (first, *_) = worker_environments(stored_job(both), REPORTING)
    free = {name for name in first if name not in RESERVED_ENV and not name.startswith(ENV_PREFIX)}
    assert free <= OVERRIDABLE


def test_what_the_user_may_set_appears_once_and_unchanged() -> None:
    given = dict.fromkeys(OVERRIDABLE, "given")
    trainer = {"trainer.env": [{"name": name, "value": value} for name, value in given.items()]}
    job = stored_job(OWN_LOOP | KINDS_OF_JOBS["torch on CPU"] | trainer)
    (container,) = worker_pod(job, resolve(job.spec), _worker(0))["spec"]["containers"]
    assert [entry for entry in container["env"] if entry["name"] in given] == trainer["trainer.env"]


@kinds_of_jobs
def test_every_worker_finds_its_place_in_the_gang(changes: Mapping[str, Any]) -> None:
    job = stored_job(changes)
    resolution = resolve(job.spec)
    spec = parse_run_spec(run_spec(job, resolution, ATTEMPT))
    environments = [read_environment(environ) for environ in worker_environments(job)]
    for environment in environments:
        check_agreement(environment, spec)
    assert [environment.host_index for environment in environments] == list(range(resolution.layout.hosts))
    assert {environment.num_hosts for environment in environments} == {resolution.layout.hosts}


@pytest.mark.parametrize("name", ["TPUJOB_RUN_SPEC", "TPUJOB_HOST_INDEX", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    (first, *_) = worker_environments(stored_job())
    del first[name]
    with pytest.raises(BadSpecError, match=name):
        read_environment(first)


def test_one_host_needs_the_run_spec_only() -> None:
    environment = read_environment({"TPUJOB_RUN_SPEC": "run.json"})
    assert (environment.num_hosts, environment.host_index) == (1, 0)


@pytest.mark.parametrize(
    ("name", "value"), [("TPUJOB_NUM_HOSTS", "2"), ("TPUJOB_NUM_HOSTS", "x"), ("TPUJOB_HOST_INDEX", "4")]
)
def test_an_environment_of_another_gang_than_the_run_specs_is_refused(name: str, value: str) -> None:
    job = stored_job()
    (first, *_) = worker_environments(job)
    with pytest.raises(BadSpecError, match=name):
        check_agreement(
            read_environment({**first, name: value}), parse_run_spec(run_spec(job, resolve(job.spec), ATTEMPT))
        )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not JSON"),
        ("[]", "the document: expected an object"),
    ],
)
def test_an_unreadable_run_spec_is_named(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadSpecError) as refusal:
        read_run_spec(path)
    assert str(refusal.value).startswith(f"run spec {path}: {complaint}")


def test_a_worker_is_at_its_id_in_the_host_names_of_its_slice() -> None:
    places = [
        environ["TPU_WORKER_HOSTNAMES"].split(",")[int(environ["TPU_WORKER_ID"])]
        for environ in worker_environments(stored_job(MULTISLICE_JOB))
    ]
    assert places == [f"2-{index}.digits" for index in range(8)]


@kinds_of_jobs
def test_a_users_own_loop_gets_the_values_of_the_run_spec(changes: Mapping[str, Any]) -> None:
    job = stored_job(changes)
    spec = run_spec(job, resolve(job.spec), ATTEMPT)
    (first, *_) = worker_environments(job)
    told = {name.removeprefix(ENV_PREFIX): value for name, value in first.items() if name.startswith(ENV_PREFIX)}
    assert {
        "GLOBAL_BATCH_SIZE": str(spec["batch"]["global"]),
        "PER_REPLICA_BATCH_SIZE": str(spec["batch"]["perReplica"]),
        "ACCUMULATION_STEPS": str(spec["batch"]["accumulation"]),
        "TRAIN_STEPS": str(spec["trainSteps"]),
        "WARMUP_STEPS": str(spec["warmupSteps"]),
        "NUM_HOSTS": str(spec["slice"]["hosts"]),
        "ATTEMPT": str(spec["job"]["attempt"]),
    }.items() <= told.items()
    assert float(told["LEARNING_RATE"]) == float(spec["optimizer"]["learningRate"])
    assert told.get("DATA_URI") == spec.get("dataUri")
    assert told.get("CHECKPOINT_URI") == spec.get("checkpoint", {}).get("uri")
    assert told.get("CHECKPOINT_RESUME_FROM") == spec.get("checkpoint", {}).get("resumeFrom")


@pytest.mark.parametrize("changes", [{}, KINDS_OF_JOBS["accumulation"]], ids=["at once", "accumulated"])
@pytest.mark.parametrize("kind", ["torch on CPU", "torch on GPUs", "torch on TPU"])
def test_the_batches_of_torchruns_processes_add_up_to_the_global_batch(kind: str, changes: dict[str, Any]) -> None:
    environs = worker_environments(stored_job(OWN_LOOP | KINDS_OF_JOBS[kind] | changes))
    each = [int(environ[PROCESS_BATCH]) * int(environ["TPUJOB_ACCUMULATION_STEPS"]) for environ in environs]
    processes = [int(environ[PROCESSES]) for environ in environs]
    assert sum(a * b for a, b in zip(each, processes, strict=True)) == int(environs[0]["TPUJOB_GLOBAL_BATCH_SIZE"])


def test_how_many_examples_a_process_gets_is_unknown_if_the_user_says_how_many_processes_there_are() -> None:
    own = OWN_LOOP | KINDS_OF_JOBS["torch on CPU"] | {"trainer.env": [{"name": PROCESSES, "value": "auto"}]}
    assert PROCESS_BATCH not in worker_environments(stored_job(own))[0]


def test_the_run_spec_is_mounted_where_the_variable_says() -> None:
    job = stored_job()
    resolution = resolve(job.spec)
    for index, environ in enumerate(worker_environments(job)):
        pod = worker_pod(job, resolution, _worker(index))
        (volume,) = [volume for volume in pod["spec"]["volumes"] if "configMap" in volume]
        (mount,) = [m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
        (item,) = volume["configMap"]["items"]
        assert environ["TPUJOB_RUN_SPEC"] == f"{mount['mountPath']}/{item['path']}"


def test_the_termination_message_is_written_where_the_kubelet_reads_it() -> None:
    job = stored_job()
    (container,) = worker_pod(job, resolve(job.spec), _worker(0))["spec"]["containers"]
    (first, *_) = worker_environments(job)
    assert first["TPUJOB_TERMINATION_LOG"] == container["terminationMessagePath"]


def _worker(host: int) -> WorkerId:
    return WorkerId(ATTEMPT, 0, host)
