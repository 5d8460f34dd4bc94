"""The slice check on this machine: all of it by `tpujob check-slice --here`, and its fast half before a training."""

import json
from pathlib import Path

import pytest

from tests.contract.jobs import job_body
from tests.local.runs import Runs
from tests.trainer.fork_server import FRAMEWORKS
from tests.trainer.gang_processes import ON_XLAS_CPU, Launcher

REPOSITORY = Path(__file__).parents[2]
CHECKED = {"runPolicy.sliceCheck": "Check", "trainer.backend": "Torch"}
BY_SECTION = {
    "Pod": {"/dev/shm"},
    "Network": {"names and ports"},
    "Chips": {"exact products", "memory", "sum over the slice, 16 MB"},
    "Run": {"train", "stop", "resume", "bit for bit"},
}


def test_this_machine_is_fit_and_every_section_was_tried(launcher: Launcher, tmp_path: Path) -> None:
    """And nothing is left in the folder for temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    arguments = ["check-slice", "v5litepod-8", "--here", "--set=trainer.backend=Torch", "-o", "json"]
    env = {**ON_XLAS_CPU, "TEST_ARGUMENTS": json.dumps(arguments), "TMPDIR": str(place)}
    said = launcher.run_alone("tests.local.forked_job", FRAMEWORKS, **env)
    assert not [*place.iterdir()]
    table = json.loads(said[said.index("{") :])
    assert (table["fit"], table["acceleratorType"]) == (True, "v5litepod-8")
    good = {(line["section"], line["name"]) for line in table["lines"] if line["verdict"] == "Ok"}
    assert {(section, name) for section, names in BY_SECTION.items() for name in names} <= good
    # While other processes take a host's CPUs, this is the only line without a verdict.
    slow = {(line["verdict"], line.get("advice", "")) for line in table["lines"] if line["name"] == "slow host"}
    assert slow <= {("Ok", ""), ("NotTried", "cannot tell: other processes had its CPUs")}
    assert slow


def test_a_training_begins_once_its_slice_has_passed(runs: Runs, tmp_path: Path) -> None:
    small = {"trainer.entrypoint": "tests.trainer.tasks:small", "recipe.globalBatchSize": 16, "recipe.trainSteps": 3}
    body = job_body(CHECKED | small | {"slice.acceleratorType": "v5litepod-4"})
    run = runs.start_job(tmp_path, body, ["--output-dir", "out", "-v"], {"PYTHONPATH": str(REPOSITORY)})
    assert run.wait() == 0, run.stderr
    assert run.stdout.index("passed its check") < run.stdout.index("step 3/3")
    # Another attempt would follow a false alarm of the check.
    assert run.result()["attempts"] == 1, run.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_a_loop_of_the_users_own_follows_the_check_and_ends_as_it_would_without(runs: Runs, code: int) -> None:
    # A restart would check the slice again.
    once = {"runPolicy.restart.limits": [{"class": "Unknown", "max": 0}]}
    run = runs.start(f'print("my own words"); sys.exit({code})', CHECKED | once)
    assert run.wait() == bool(code), run.stderr
    result = run.result()
    if code:
        failure = result["failure"]
        assert (failure["reason"], failure["exitCode"]) == ("ExitCode", 3)
        assert failure["message"].splitlines()[-1] == "my own words"
    else:
        # Another attempt would follow a false alarm of the check, and the log below would have no words of a pass.
        assert (result["state"], result["attempts"]) == ("Succeeded", 1), run.stdout
    log = (run.out / "pods" / "digits-1-0-0" / "log.txt").read_text()
    assert log.index("passed its check") < log.index("my own words")
    assert not (run.out / "report.html").exists()
