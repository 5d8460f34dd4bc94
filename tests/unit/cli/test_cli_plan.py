"""`tpujob plan`, `validate` and `crd`: what users learn before they pay for chips."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import ABSENT, job_body
from tpu_training_operator.api.crd import custom_resource_definition
from tpu_training_operator.cli.main import main


def tpujob(*arguments: str | Path, job: dict[str, Any] | None = None) -> Result:
    """The command; `job` is given on its standard input."""
    text = yaml.safe_dump(job) if job else None
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=text)


def planned(changes: dict[str, Any]) -> dict[str, Any]:
    result = tpujob("plan", "-f", "-", "-o", "json", job=job_body(changes))
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def tuned_on_v2_8(batch: int, steps: int) -> dict[str, Any]:
    return {
        "spec.slice.acceleratorType": "v3-32",
        "spec.recipe.tunedOn": {"acceleratorType": "v2-8"},
        "spec.recipe.globalBatchSize": batch,
        "spec.recipe.trainSteps": steps,
    }


@pytest.mark.parametrize(
    ("batch", "steps", "scaled_batch", "scaled_steps"), [(1024, 1000, 4096, 250), (1000, 100, 4000, 25)]
)
def test_a_recipe_of_one_v2_host_on_four_v3_hosts(batch: int, steps: int, scaled_batch: int, scaled_steps: int) -> None:
    resolved = planned(tuned_on_v2_8(batch, steps))["resolved"]
    assert (resolved["hosts"], resolved["chips"], resolved["replicas"]) == (4, 16, 32)
    assert (resolved["globalBatchSize"], resolved["trainSteps"]) == (scaled_batch, scaled_steps)
    assert (resolved["perReplicaBatchSize"], resolved["scaleFactor"]) == (batch // 8, 4)
    assert resolved["learningRate"] == 0.4


def test_the_plan_holds_the_objects_of_the_first_attempt() -> None:
    objects = planned({})["objects"]
    assert [(body["kind"], body["metadata"]["name"]) for body in objects] == [
        ("Service", "digits"),
        ("ConfigMap", "digits-1"),
        ("ConfigMap", "digits-1-env"),
        *(("Pod", f"digits-1-0-{host}") for host in range(4)),
    ]


def test_yaml_and_json_say_the_same() -> None:
    result = tpujob("plan", "-f", "-", "-o", "yaml", job=job_body())
    assert yaml.safe_load(result.stdout) == planned({})


def test_the_plan_begins_with_the_entry_check_if_there_is_one() -> None:
    objects = planned({"spec.entryCheck.mode": "Auto"})["objects"]
    assert [(body["kind"], body["metadata"]["name"]) for body in objects[:3]] == [
        ("ConfigMap", "digits-0"),
        ("Pod", "digits-entry-check"),
        ("Service", "digits"),
    ]


def test_the_plan_shows_fewer_slices_and_which_numbers_are_left_out(snapshot: SnapshotAssertion) -> None:
    changes = {"spec.slice": {"acceleratorType": "v5litepod-8", "count": 4}, "spec.trainer.backend": "XLASPMD"}
    job = job_body(changes | {"spec.placement.count": {"min": 1, "waitForPreviousSeconds": 90}})
    found = planned(changes | {"spec.placement.count": {"min": 1, "waitForPreviousSeconds": 90}})["alternatives"]
    assert [(one["slice"], one["waitForPreviousSeconds"], one["resolved"]["accumulationSteps"]) for one in found] == [
        ("2 x v5litepod-8", 90, 2),
        ("v5litepod-8", 90, 4),
    ]
    text = tpujob("plan", "-f", "-", job=job).stdout
    assert "after 90 s without all " in " ".join(text.split())
    assert text.splitlines()[-1] == snapshot


def test_a_plan_for_a_slice_that_gke_lacks_has_numbers_and_a_warning(snapshot: SnapshotAssertion) -> None:
    document = planned({"spec.slice.acceleratorType": "v2-32", "spec.recipe.globalBatchSize": 1024})
    assert document["resolved"]["replicas"] == 32
    assert document["objects"] == []
    [warning] = document["warnings"]
    assert warning == snapshot


def test_the_table_shows_both_slices_and_the_rule_between_them() -> None:
    result = tpujob("plan", "-f", "-", job=job_body(tuned_on_v2_8(1024, 1000)))
    rows = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := _cells(line))}
    assert result.exit_code == 0
    assert rows["hosts"][:2] == ["1", "4"]
    assert rows["global batch"][:2] == ["1024", "4096"]
    assert rows["train steps"][:2] == ["1000", "250"]
    assert rows["learning rate"][:2] == ["0.1", "0.4"]
    assert "linear rule" in rows["learning rate"][2]


def test_warnings_follow_the_table_one_per_line(snapshot: SnapshotAssertion) -> None:
    recipe = {"optimizer.name": "sophia", "tunedOn": {"acceleratorType": "v5litepod-4"}, "trainSteps": 4000}
    changes = {f"spec.recipe.{path}": value for path, value in recipe.items()}
    rule, built = tpujob("plan", "-f", "-", job=job_body(changes)).stdout.splitlines()[-2:]
    assert "'sophia'" in rule
    assert "recipe.scaling.learningRate" in rule
    assert [rule, built] == snapshot


SPOT = {"spec.slice.provisioning": {"type": "Spot"}}
SHARED = {"spec.trainer.volumeMounts": [{"name": "disk", "mountPath": "/mnt/"}]}
CLAIM = {"spec.trainer.volumes": [{"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}}]}
EMPTY_DIR = {"spec.trainer.volumes": [{"name": "disk", "emptyDir": {}}]}
OWN_LOOP = {"spec.trainer.entrypoint": ABSENT, "spec.trainer.command": ["python", "train.py"]}
# On several hosts it may be several programs, which has a warning of its own.
JOINED = OWN_LOOP | {"spec.slice.hardware": "CPU", "spec.trainer.backend": "Torch"}


def saved_in(uri: str, **more: int) -> dict[str, Any]:
    return {"spec.checkpoint": {"uri": uri, **more}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        saved_in("gs://bucket/digits"),
        SPOT | saved_in("gs://bucket/digits"),
        SPOT | JOINED,
        saved_in("/mnt/digits") | SHARED | CLAIM,
        saved_in("/mnt") | SHARED | CLAIM,
    ],
)
def test_checkpoints_that_survive_a_worker_or_are_not_needed_get_no_warning(changes: dict[str, Any]) -> None:
    assert planned(changes)["warnings"] == []


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"profile": {"steps": 5}}, ["profile"]),
        ({"profile": {"steps": 5}, "tensorBoard": True}, ["profile", "tensorBoard"]),
        ({"profile": {"steps": 5}, "uri": "gs://bucket/reports"}, []),
        ({"gradientNoiseScale": True}, []),
    ],
)
def test_a_report_without_a_place_gets_a_warning(report: dict[str, Any], named: list[str]) -> None:
    warnings = planned({"spec.report": report})["warnings"]
    assert [text.partition(" has no effect")[0] for text in warnings] == [f"spec.report.{part}" for part in named]


@pytest.mark.parametrize(
    "changes",
    [
        saved_in("/mnt/digits"),
        saved_in("/mnt/digits") | SHARED | EMPTY_DIR,
        saved_in("/mnt2/digits") | SHARED | CLAIM,
    ],
    ids=["no volume", "a volume that ends with the pod", "beside the volume"],
)
def test_checkpoints_on_a_workers_own_disk_get_a_warning(changes: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    uri = changes["spec.checkpoint"]["uri"]
    [warning] = planned(changes)["warnings"]
    assert warning.startswith(f"spec.checkpoint.uri {uri} ")
    assert warning == snapshot


def test_spot_slices_without_checkpoints_get_a_warning(snapshot: SnapshotAssertion) -> None:
    [note] = planned(SPOT)["warnings"]
    assert note == snapshot
    assert tpujob("validate", "-f", "-", job=job_body(SPOT)).stderr == f"warning: {note}\n"


MOVES = {"spec.placement": {"alternatives": [{"slice": {"acceleratorType": "v5litepod-8"}}]}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (MOVES, "every move begins at step 0"),
        (MOVES | OWN_LOOP | {"spec.slice": {"acceleratorType": "v5litepod-4"}}, None),
        # 300 steps.
        (MOVES | saved_in("gs://bucket/digits", everySteps=300), "everySteps is 300"),
        (SPOT | saved_in("gs://bucket/digits", everySteps=301), "everySteps is 301"),
        (MOVES | saved_in("gs://bucket/digits", everySteps=299), None),
        (MOVES | saved_in("gs://bucket/digits", everySteps=300, everySeconds=60), None),
        (MOVES | saved_in("gs://bucket/digits"), None),
        (saved_in("gs://bucket/digits", everySteps=300), None),
    ],
)
def test_a_job_that_would_lose_all_its_steps_with_its_slice_gets_a_warning(
    changes: dict[str, Any], words: str | None, snapshot: SnapshotAssertion
) -> None:
    warnings = planned(changes)["warnings"]
    assert [str(words) in warning for warning in warnings] == [True] * (words is not None)
    assert warnings == snapshot


def test_an_optimizer_whose_state_cannot_be_divided_is_warned_of(snapshot: SnapshotAssertion) -> None:
    changes = {"spec.recipe.optimizer.name": "Adafactor", "spec.recipe.sharding": "Optimizer"}
    (warning,) = planned(changes)["warnings"]
    assert tpujob("validate", "-f", "-", job=job_body(changes)).stderr == f"warning: {warning}\n"
    assert warning == snapshot


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        ({"name": "Constant"}, "after warm-up"),
        ({"name": "Cosine", "factor": 0.1}, "down to 0.1 of the rate after warm-up"),
        ({"name": "Linear"}, "down to 0 of the rate after warm-up"),
        ({"name": "Step", "milestones": [100]}, "x 0.1 at every milestone"),
    ],
)
def test_the_table_names_schedule_and_optimizer(schedule: dict[str, Any], rule: str) -> None:
    optimizer = {"name": "rmsprop", "learningRate": 8e-12, "momentum": 0.9, "epsilon": 1e-8}
    result = tpujob(
        "plan", "-f", "-", job=job_body({"spec.recipe.schedule": schedule, "spec.recipe.optimizer": optimizer})
    )
    rows = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := _cells(line))}
    assert rows["schedule"] == [schedule["name"], schedule["name"], rule]
    assert rows["optimizer"] == ["rmsprop", "rmsprop", "momentum 0.9"]
    assert rows["epsilon"][:2] == ["1e-8", "1e-8"]
    assert rows["learning rate"][:2] == ["8e-12", "8e-12"]


def test_a_recipe_in_epochs_shows_them() -> None:
    changes = {"spec.recipe.trainSteps": ABSENT, "spec.recipe.epochs": 3, "spec.recipe.datasetSize": 1280}
    result = tpujob("plan", "-f", "-", job=job_body(changes))
    rows = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := _cells(line))}
    assert rows["train steps"][:2] == ["3 epochs", "30"]


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        ({}, "every 10 min"),
        ({"everySeconds": 1800}, "every 30 min"),
        ({"everySteps": 500}, "every 500 steps"),
        ({"everySteps": 500, "everySeconds": 1800}, "every 500 steps or 30 min"),
    ],
)
def test_the_table_says_where_and_how_often_checkpoints_are_saved(given: dict[str, int], interval: str) -> None:
    result = tpujob("plan", "-f", "-", job=job_body(saved_in("gs://bucket/digits", **given)))
    [row] = [_cells(line) for line in result.stdout.splitlines() if "checkpoint" in line]
    assert row[:3] == ["checkpoint", "", interval]
    assert "gs://bucket/digits/default/digits" in row[3]
    assert row[3].endswith(" 3")


def test_the_table_says_what_follows_the_evaluations_and_which_weights_the_job_begins_with(
    snapshot: SnapshotAssertion,
) -> None:
    given = {"keepBest": {"metric": "f1", "mode": "Max"}, "initFrom": {"uri": "/mnt/w.safetensors"}}
    plateau = {"name": "Plateau", "metric": "f1", "mode": "Max", "patience": 1}
    changes = {
        "spec.recipe.evaluateEverySteps": 25,
        "spec.recipe.schedule": plateau,
        "spec.recipe.stopEarly": {"metric": "loss", "mode": "Min", "patience": 3, "minDelta": "0.01"},
    }
    result = tpujob("plan", "-f", "-", job=job_body(saved_in("gs://bucket/a", **given) | changes))
    rows = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := _cells(line))}
    assert rows["checkpoint"][-1].endswith(" f1")
    assert rows["starts with"][-1].endswith(" /mnt/w.safetensors")
    assert rows["rate on a plateau"][1] == "x 0.1"
    assert rows["stop early"][1] == "3 evaluations"
    assert result.stdout == snapshot


def test_the_table_says_what_is_left_to_the_users_own_loop(snapshot: SnapshotAssertion) -> None:
    changes = {"spec.recipe.evaluateEverySteps": 25, "spec.recipe.emaDecay": "0.99"}
    result = tpujob("plan", "-f", "-", job=job_body(JOINED | saved_in("gs://bucket/a") | changes))
    rows = [line for line in result.stdout.splitlines() if re.search("checkpoint|evaluate every|EMA", line)]
    assert ["left to your command" in row for row in rows] == [True] * 3
    assert result.stdout.splitlines()[-1] == snapshot


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"spec.slice.hardware": "CPU"}, "each of the 4 hosts trains its own model"),
        ({"spec.slice.hardware": "CPU", "spec.trainer.backend": "Torch"}, None),
        ({"spec.slice": {"acceleratorType": "v5litepod-4", "hardware": "CPU"}}, None),
        ({"spec.slice": {"acceleratorType": "v5litepod-4"}}, None),
        ({}, "the 4 hosts train one model only if"),
    ],
    ids=["hosts on CPU", "joined by torchrun", "one host on CPU", "one host", "joined by the program, or not at all"],
)
def test_a_users_own_loop_whose_hosts_may_train_separate_models_gets_a_warning(
    changes: dict[str, Any], warning: str | None
) -> None:
    warnings = planned(OWN_LOOP | changes)["warnings"]
    assert [text[: len(warning or "")] for text in warnings] == ([] if warning is None else [warning])
    validated = tpujob("validate", "-f", "-", job=job_body(OWN_LOOP | changes))
    assert warning is None or warning in validated.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("torchrun train.py --standalone --nnodes 1", None),
        ("torchrun --nnodes=4 --node_rank $(TPUJOB_HOST_INDEX) --nproc-per-node=1 train.py", None),
        ("torchrun --nnodes=$(TPUJOB_NUM_HOSTS) -m train --nproc-per-node=8", None),
        ("python train.py --standalone", None),
        ("torchrun --standalone --nproc_per_node=1 train.py", "--standalone"),
        ("python -m torch.distributed.run --nnodes 1 train.py", "--nnodes"),
        ("/opt/bin/torchrun --standalone --nnodes=1 train.py", "--nnodes"),
        ("torchrun --nnodes=2 train.py", "--nnodes 2"),
        ("torchrun --rdzv-endpoint localhost:29400 train.py", "--rdzv-endpoint localhost:29400"),
        ("torchrun --nproc_per_node gpu train.py", "--nproc-per-node gpu"),
    ],
)
def test_options_of_torchrun_that_part_the_hosts_get_a_warning(
    command: str, option: str | None, snapshot: SnapshotAssertion
) -> None:
    program, *arguments = command.split()
    torch = {"spec.slice.hardware": "CPU", "spec.trainer.backend": "Torch"}
    job = OWN_LOOP | torch | {"spec.trainer.command": [program], "spec.trainer.args": arguments}
    warnings = planned(job)["warnings"]
    assert [str(option) in warning for warning in warnings] == [True] * (option is not None)
    assert warnings == snapshot


def test_a_valid_job_is_called_valid(snapshot: SnapshotAssertion) -> None:
    result = tpujob("validate", "-f", "-", job=job_body())
    assert result.exit_code == 0
    assert "4 hosts of v5litepod-16" in result.stdout
    assert result.stdout == snapshot


def test_validate_takes_the_job_as_it_would_be_submitted() -> None:
    options = ("--slice", "v5litepod-8", "--set", "recipe.seed=1")
    result = tpujob("validate", "-f", "-", *options, job=job_body({"spec.recipe.seed": "one"}))
    assert result.exit_code == 0
    assert "2 hosts of v5litepod-8" in result.stdout


def test_validate_warns_on_stderr(snapshot: SnapshotAssertion) -> None:
    result = tpujob("validate", "-f", "-", job=job_body({"spec.recipe.warmupSteps": 301}))
    assert result.exit_code == 0
    assert re.findall(r"\d+", result.stderr) == ["301", "300"]
    assert result.stderr == snapshot


def test_the_examples_are_valid() -> None:
    examples = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
    assert examples != []
    assert [path.name for path in examples if tpujob("validate", "-f", path).exit_code != 0] == []


def test_crd_prints_the_definition() -> None:
    assert yaml.safe_load(tpujob("crd").stdout) == custom_resource_definition()


def test_the_job_may_be_among_other_documents(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"---\nkind: Namespace\n---\n{yaml.safe_dump(job_body())}---\n")
    assert tpujob("validate", "-f", path).exit_code == 0


def test_a_job_without_a_namespace_is_planned_in_the_default_one() -> None:
    objects = planned({"metadata.namespace": None})["objects"]
    assert {body["metadata"]["namespace"] for body in objects} == {"default"}


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "-h"], ["run", "-h"], ["validate", "-h"], ["crd", "-h"]])
def test_every_command_has_help(arguments: list[str]) -> None:
    result = tpujob(*arguments)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").strip("│ ").split("│")] if "│" in line else []


@pytest.mark.parametrize(("then", "end"), [("Suspend", "it is suspended"), ("Fail", "it fails")])
def test_a_budget_is_shown_with_how_long_it_lasts(then: str, end: str, snapshot: SnapshotAssertion) -> None:
    job = job_body({"spec.runPolicy": {"budget": {"chipHours": 8, "onExceeded": then}}})
    short = tpujob("plan", "-f", "-", "--step-seconds", "60", job=job).stdout
    assert f"0.5 hours on 16 chips; then {end}" in short
    assert "spec.runPolicy.budget.chipHours" in " ".join(short.split())
    assert " ".join(short.split()) == snapshot
    assert "chip-hours, and" not in tpujob("plan", "-f", "-", "--step-seconds", "0.1", job=job).stdout


@pytest.mark.parametrize("given", [0, -1, 2**31, 1.5, "10", True, None])
def test_chip_hours_are_a_whole_number(given: object) -> None:
    result = tpujob("validate", "-f", "-", job=job_body({"spec.runPolicy": {"budget": {"chipHours": given}}}))
    assert result.exit_code == 1
    assert "spec.runPolicy.budget.chipHours" in result.stderr


@pytest.mark.parametrize("given", ["nan", "inf", "1e400", "0", "-1", "soon"])
def test_the_time_of_a_step_is_a_number_of_seconds(given: str) -> None:
    assert tpujob("plan", "-f", "-", "--step-seconds", given, job=job_body()).exit_code == 2


@pytest.mark.parametrize(
    ("begin", "chip_hours", "warns"),
    # 20 steps on 4 chips, 75 on 16 at 0.1 hours each: 8 + 120 chip-hours, or 8 + 112 if the job continues the rung,
    # whose 20 steps of 32 are 5 of 128.
    [("Scratch", 127, True), ("Scratch", 128, False), ("Checkpoint", 119, True), ("Checkpoint", 120, False)],
)
def test_the_rungs_below_a_job_count_against_its_budget(begin: str, chip_hours: int, warns: bool) -> None:
    changes = {
        "spec.recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "spec.recipe.globalBatchSize": 32,
        "spec.ladder": {"from": begin, "rungs": [{"slice": {"acceleratorType": "v5litepod-4"}, "steps": 20}]},
        "spec.runPolicy": {"budget": {"chipHours": chip_hours}},
        **saved_in("gs://bucket/digits"),
    }
    text = tpujob("plan", "-f", "-", "--step-seconds", "360", job=job_body(changes)).stdout
    assert ("the rungs below it 8" in text) == warns


_TORCH_TPU = {
    "spec.trainer.backend": "Torch",
    "spec.trainer.torch": {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": 4},
}


@pytest.mark.parametrize(
    ("accelerator", "changes", "warning"),
    [
        ("tpu7x-128", {}, "the libtpu of torch_xla 2.9 (0.0.21) does not know tpu7x"),
        ("v3-16", {}, "torch_xla 2.9 does not know v3-16"),
        ("v4-128", _TORCH_TPU, "TorchTPU 0.2 looks for chips in /dev/vfio"),
        ("v4-128", {}, None),
        ("v5litepod-16", _TORCH_TPU, None),
        ("v3-32", {}, None),
    ],
    ids=str,
)
def test_a_slice_that_the_worker_image_cannot_use_is_told(
    accelerator: str, changes: dict[str, Any], warning: str | None
) -> None:
    job = job_body({"spec.slice": {"acceleratorType": accelerator}, **changes})
    said = tpujob("validate", "-f", "-", job=job)
    assert said.exit_code == 0, said.output
    lines = [line for line in said.stderr.splitlines() if "torch_xla" in line or "TorchTPU" in line]
    assert [line.startswith(f"warning: {warning}") for line in lines] == [True] * (warning is not None)
