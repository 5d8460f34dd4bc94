"""What the trainer accepts as a run spec and as an environment, and what it says about the rest."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from syrupy.assertion import SnapshotAssertion

from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import RunSpecError, TorchSpec, parse_run_spec
from tpu_trainer.contract.environment import check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.errors import BadSpecError

VALIDATOR = jsonschema.Draft202012Validator(
    json.loads(files("tpu_contract").joinpath("runspec-v1.schema.json").read_text())
)


def changed(path: str, value: Any) -> dict[str, Any]:
    """A valid run spec with one field set; the value ... takes the field away."""
    document = json.loads(json.dumps(run_spec(hosts=4)))
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


ROW = {"name": "chips", "tunedOn": "4", "runsOn": "16", "rule": ""}
TORCH_TPU = {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": 1}

RIGHT = [
    ("dataUri", "gs://bucket/digits"),
    ("parameters", {"hidden": "128"}),
    ("parameters", ...),
    ("optimizer.momentum", ...),
    ("optimizer.learningRate", "1e-4"),
    ("optimizer.learningRate", ".5"),
    ("warmupSteps", 0),
    ("seed", 2**32 - 1),
    ("job.attempt", 0),
    ("torch", {"device": "cuda", "collectives": "nccl", "processesPerHost": 2}),
    ("torch", {"device": "cpu", "collectives": "gloo", "processesPerHost": 2, "execution": "Compile"}),
    ("checkpoint", {"uri": "/mnt/run", "keep": 1}),
    ("checkpoint", {"uri": "gs://bucket/run", "everySteps": 1, "everySeconds": 60, "keep": 1}),
    ("report", {}),
    ("report", {"uri": "/mnt/run", "tensorBoard": True, "gradientNoiseScale": False}),
    ("loop", "BuiltIn"),
    ("scaling", []),
    ("scaling", [ROW] * 64),
    ("scaling", [dict.fromkeys(ROW, "")]),
    ("scaling", [ROW | {"rule": "x" * 4096}]),
]

WRONG = [
    ("job.uid", "", "job.uid: expected a non-empty string, got ''"),
    ("entrypoint", "examples.digits", "entrypoint: expected \"module:callable\", got 'examples.digits'"),
    ("entrypoint", "a:b:c", "entrypoint: expected \"module:callable\", got 'a:b:c'"),
    ("backend", "jax", 'backend: expected "xla" or "xla-spmd" or "torch", got \'jax\''),
    ("hardware", "GPU", 'hardware: expected "TPU" or "CPU", got \'GPU\''),
    ("slice", [], "slice: expected an object, got []"),
    ("slice.hosts", 0, "slice.hosts: expected an integer of at least 1, got 0"),
    ("batch.global", "16", "batch.global: expected an integer of at least 1, got '16'"),
    ("batch.perReplica", True, "batch.perReplica: expected an integer of at least 1, got True"),
    ("batch.size", 1, "batch.size: unknown field; known here: global, perReplica, accumulation"),
    ("seed", -1, "seed: expected an integer of at least 0 and at most 4294967295, got -1"),
    ("seed", 2**32, "seed: expected an integer of at least 0 and at most 4294967295, got 4294967296"),
    ("optimizer.learningRate", 0.1, 'optimizer.learningRate: expected a decimal string such as "0.1" or "1e-4"'),
    ("optimizer.learningRate", "-1", 'optimizer.learningRate: expected a decimal string such as "0.1" or "1e-4"'),
    ("optimizer.beta1", "nan", 'optimizer.beta1: expected a decimal string such as "0.1" or "1e-4", got \'nan\''),
    ("parameters.hidden", 128, "parameters.hidden: expected a string, got 128"),
    ("dataUri", None, "dataUri: expected a non-empty string, got None"),
    ("torch", TORCH_TPU | {"execution": "eager"}, 'torch.execution: expected "Compile" or "Fuse" or "Eager"'),
    ("checkpoint", {"uri": "/mnt/run", "keep": 0}, "checkpoint.keep: expected an integer of at least 1, got 0"),
    ("report", {"tensorBoard": "yes"}, "report.tensorBoard: expected true or false, got 'yes'"),
    ("report", {"tensorBoard": 1}, "report.tensorBoard: expected true or false, got 1"),
    ("schedule", {"name": "Step", "milestones": [100, 0]}, "schedule.milestones: expected a list of integers"),
    ("schedule", {"name": "Step", "milestones": [100, True]}, "schedule.milestones: expected a list of integers"),
    ("scaling", ROW, "scaling: expected a list of at most 64 objects, got {'name'"),
    ("scaling", [ROW] * 65, "scaling: expected a list of at most 64 objects, got [{'name'"),
    ("scaling", [ROW, "chips"], "scaling: expected a list of at most 64 objects, got [{'name'"),
    ("scaling", [ROW, {"name": "chips"}], "scaling[1].tunedOn: missing"),
    ("scaling", [ROW | {"why": ""}], "scaling[0].why: unknown field; known here: name, tunedOn, runsOn, rule"),
    ("scaling", [ROW | {"runsOn": 16}], "scaling[0].runsOn: expected a string of at most 4096 characters, got 16"),
    ("scaling", [ROW | {"rule": "x" * 4097}], "scaling[0].rule: expected a string of at most 4096 characters"),
]

WRONG_TOGETHER = [
    ("batch.global", 32, "batch.global: 8 replicas x 2 per replica make 16, got 32"),
    ("slice.hosts", 3, "slice.replicas: 8 replicas cannot be divided evenly among 3 hosts"),
    ("slice.slices", 3, "slice.hosts: 4 hosts cannot be divided evenly among 3 slices"),
    ("hardware", "TPU", 'backend: "torch" with torch.device "cpu" does not run on hardware "TPU"; torch'),
    ("torch", TORCH_TPU, 'backend: "torch" with torch.device "tpu" does not run on hardware "CPU"; torch'),
    (
        "torch",
        TORCH_TPU | {"processesPerHost": 3},
        "torch.processesPerHost: 8 replicas cannot be divided evenly among 4",
    ),
    (
        "torch",
        TORCH_TPU | {"device": "cpu", "execution": "Fuse"},
        'torch.execution: "Fuse" is a mode of TorchTPU and needs torch.device "tpu", got "cpu"',
    ),
    ("backend", "xla-spmd", 'backend: "xla-spmd" on hardware "CPU" runs on one host, because'),
]


@pytest.mark.parametrize(("path", "value"), RIGHT)
def test_parser_and_schema_accept_a_valid_run_spec(path: str, value: Any) -> None:
    parse_run_spec(changed(path, value))
    VALIDATOR.validate(changed(path, value))


@pytest.mark.parametrize(("path", "value", "complaint"), WRONG)
def test_parser_and_schema_refuse_a_wrong_field_and_the_parser_names_its_path(
    path: str, value: Any, complaint: str
) -> None:
    with pytest.raises(RunSpecError) as refusal:
        parse_run_spec(changed(path, value))
    assert str(refusal.value).startswith(complaint)
    assert not VALIDATOR.is_valid(changed(path, value))


@pytest.mark.parametrize(("path", "value", "complaint"), WRONG_TOGETHER)
def test_fields_that_contradict_each_other_are_refused_with_a_path(path: str, value: Any, complaint: str) -> None:
    with pytest.raises(RunSpecError) as refusal:
        parse_run_spec(changed(path, value))
    assert str(refusal.value).startswith(complaint)


def test_torch_on_tpu_is_read_with_its_device_and_collectives() -> None:
    spec = parse_run_spec({**run_spec(), "hardware": "TPU", "torch": TORCH_TPU})
    assert spec.torch == TorchSpec("tpu", "tpu_dist", 1)


def test_spmd_on_cpu_is_read_with_one_host() -> None:
    assert parse_run_spec(run_spec(backend="xla-spmd")).backend == "xla-spmd"


@pytest.mark.parametrize("backend", ["xla", "xla-spmd"])
def test_torchs_settings_go_with_torch_only(backend: str) -> None:
    with pytest.raises(RunSpecError, match=f'torch: goes with backend "torch" only, got backend "{backend}"'):
        parse_run_spec(run_spec(backend=backend, torch=TORCH_TPU))


def test_another_schema_version_is_the_first_complaint(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(RunSpecError) as caught:
        parse_run_spec({"schema": "runspec/v2"})
    assert str(caught.value) == snapshot


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not JSON"),
        ("[]", "the document: expected an object"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadSpecError) as refusal:
        read_run_spec(path)
    assert str(refusal.value).startswith(f"run spec {path}: {complaint}")


COMPLETE = {
    "TPUJOB_RUN_SPEC": "/etc/tpu-training/run.json",
    "TPUJOB_NUM_HOSTS": "4",
    "TPUJOB_HOST_INDEX": "3",
    "MASTER_ADDR": "digits-0-0",
    "MASTER_PORT": "29500",
}


def test_a_complete_environment_is_read() -> None:
    environment = read_environment(COMPLETE)
    assert (environment.num_hosts, environment.host_index) == (4, 3)
    assert (environment.master_addr, environment.master_port) == ("digits-0-0", 29500)


def test_one_host_needs_the_run_spec_only() -> None:
    environment = read_environment({"TPUJOB_RUN_SPEC": "run.json"})
    assert (environment.num_hosts, environment.host_index) == (1, 0)


@pytest.mark.parametrize("name", ["TPUJOB_RUN_SPEC", "TPUJOB_HOST_INDEX", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(BadSpecError, match=name):
        read_environment({key: value for key, value in COMPLETE.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"), [("TPUJOB_NUM_HOSTS", "2"), ("TPUJOB_NUM_HOSTS", "x"), ("TPUJOB_HOST_INDEX", "4")]
)
def test_an_environment_of_another_gang_than_the_run_specs_is_refused(name: str, value: str) -> None:
    with pytest.raises(BadSpecError, match=name):
        check_agreement(read_environment({**COMPLETE, name: value}), parse_run_spec(run_spec(hosts=4)))
