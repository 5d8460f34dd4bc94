"""How a local run ends: exit status, result.json, and what the user sees."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.contract.jobs import job_body
from tests.local.runs import REPORTER, Run, Runs
from tests.unit.histories import SUCCEEDED, document, losses_of, typical
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.recipe.resolve import resolve

# Like the trainer: leaves its history and reports the newest numbers to the operator.
REPORT = (
    REPORTER
    + """
def trained(step, loss, **more):
    report(step, loss=loss, examplesPerSecond=900.0, **more)

def leave(history):
    (pathlib.Path(os.environ["TPUJOB_REPORT_DIRECTORY"]) / "history.json").write_bytes(history)

def last_words(**words):
    pathlib.Path(os.environ["TPUJOB_TERMINATION_LOG"]).write_text(json.dumps(words))
"""
)
WARNINGS = ["waiting for data takes 40 % of the step", "host 1 is slow"]
BEST = {"name": "step-00000200-0b9e5a3c-1", "step": 200, "metric": "accuracy", "value": 0.875}
EVALUATIONS = [
    {"step": 3, "metrics": {"accuracy": 0.5, "perplexity": math.nan}},
    {"step": 300, "metrics": {"accuracy": 0.75, "perplexity": 1.5, "step": 7.0}},
]
SHORT = typical() | {"losses": losses_of([1.5, math.nan, 0.25]), "evaluations": EVALUATIONS}
TRAIN = (
    REPORT
    + f"BEST = {BEST}; SLOW, STRAGGLER = {WARNINGS}; HISTORY = {document(SHORT, outcome=SUCCEEDED)!r}"
    + """
if HOST == 0:
    trained(3, None, warnings=[SLOW, SLOW], checkpointStep=None)
    trained(300, 0.25, warnings=[SLOW, STRAGGLER], checkpointStep=250)
    leave(HISTORY)
    last_words(outcome="Succeeded", message="trained", step=300, metrics={"loss": 0.25, "accuracy": 0.75},
               examplesPerSecond=1000.5, bestCheckpoint=BEST)
"""
)
FAIL_ON_HOST_1 = """
if HOST == 1:
    print("Traceback (most recent call last):")
    sys.exit("ValueError: no such file: train.csv")
wait_forever()
"""
QUICK_RESTARTS = {"runPolicy.restart.backoff": {"initialSeconds": 1, "maxSeconds": 1}}


def succeeded(run: Run) -> dict[str, Any]:
    assert run.wait() == 0, run.stdout + run.stderr
    return run.result()


def test_a_run_that_succeeds_leaves_its_result(runs: Runs) -> None:
    run = runs.start(TRAIN, hosts=2)
    result = succeeded(run)
    assert result.pop("seconds") > 0
    assert [start["attempt"] for start in result.pop("starts")] == [1]
    body = json.loads((run.directory / "job.json").read_text())
    body["spec"]["slice"]["hardware"] = "CPU"
    plan = resolve(parse_job(body).spec)
    assert result == {
        "job": "digits",
        "state": "Succeeded",
        "attempts": 1,
        "message": "all 2 workers have finished: trained",
        "resolved": plan.resolved.as_json(),
        "moves": [],
        "rungs": [],
        "metrics": {"loss": 0.25, "accuracy": 0.75},
        "examplesPerSecond": 1000.5,
        "lossCurve": [
            {"step": 1, "loss": 1.5},
            {"step": 2, "loss": None},
            {"step": 3, "loss": 0.25},
        ],
        "evaluations": [
            {"step": 3, "accuracy": 0.5, "perplexity": None},
            {"step": 300, "accuracy": 0.75, "perplexity": 1.5},
        ],
        "gradientNoiseScale": None,
        "warnings": [*plan.warnings, *WARNINGS],
        "checkpointStep": 250,
        "bestCheckpoint": BEST | {"value": "0.875"},
        "restarts": {},
        "failure": None,
        "logs": str(run.out / "pods"),
    }


def test_a_final_loss_that_is_not_finite_is_shown(runs: Runs) -> None:
    run = runs.start(REPORT + "trained(300, float('nan')); last_words(outcome='Succeeded', step=300, metrics={})")
    succeeded(run)
    assert re.search(r"^  loss +nan$", run.stdout, re.MULTILINE)


def test_a_loop_that_reports_nothing_succeeds_without_metrics(runs: Runs) -> None:
    result = succeeded(runs.start("print('done')"))
    assert (result["state"], result["metrics"], result["lossCurve"]) == ("Succeeded", {}, [])
    assert result["examplesPerSecond"] is None
    assert (result["warnings"], result["checkpointStep"]) == ([], None)


def test_warnings_of_the_plan_are_in_the_result_and_at_the_end(runs: Runs) -> None:
    run = runs.start("print('done')", {"recipe.tunedOn": {"acceleratorType": "v5litepod-1"}, "recipe.trainSteps": 4})
    [warning] = [text for text in succeeded(run)["warnings"] if text.startswith("the training makes 1 update,")]
    assert f"  warning    {warning}" in run.stdout


def test_a_user_error_fails_the_run_with_the_end_of_the_log_and_ends_the_other_workers(runs: Runs) -> None:
    run = runs.start(FAIL_ON_HOST_1, hosts=4)
    assert run.wait() == 1
    result = run.result()
    failure = result.pop("failure")
    assert (result["state"], result["attempts"], result["restarts"]) == ("Failed", 1, {})
    assert (failure["class"], failure["exitCode"], failure["slice"], failure["host"]) == ("UserError", 1, 0, 1)
    assert failure["message"].splitlines()[-1].startswith("ValueError: ")
    assert "UserError on slice 0 host 1:" in run.stderr
    assert "    ValueError: no such file" in run.stderr
    assert run.surviving_processes() == []


@pytest.mark.parametrize(
    ("end", "failure_class"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Infrastructure"),
        ("sys.exit(75)", "Preemption"),
        ("sys.exit(42)", "Unknown"),
    ],
    ids=["killed from outside", "preempted", "an exit code of the user's own"],
)
def test_a_failure_that_may_pass_restarts_the_whole_gang(runs: Runs, end: str, failure_class: str) -> None:
    script = f"""
if ATTEMPT == 1:
    if HOST == 1: {end}
    wait_forever()
"""
    run = runs.start(script, QUICK_RESTARTS, hosts=2)
    result = succeeded(run)
    assert (result["attempts"], result["restarts"]) == (2, {failure_class: 1})
    assert (result["failure"]["attempt"], result["failure"]["host"]) == (1, 1)
    assert all(run.has_told("started", host, attempt=2) for host in range(2))


def test_the_loss_curve_prefers_the_latest_attempt(runs: Runs) -> None:
    attempts = """
if ATTEMPT == 1:
    trained(2, 9.0)
    trained(3, 7.0)
    sys.exit(75)
trained(2, 0.5)
"""
    run = runs.start(REPORT + attempts, QUICK_RESTARTS)
    assert {"step": 2, "loss": 0.5} in succeeded(run)["lossCurve"]


def test_a_warning_of_an_earlier_attempt_is_not_repeated(runs: Runs) -> None:
    attempts = """
if HOST == 0:
    trained(3, 1.0, warnings=["host 1 is slow"], checkpointStep=2)
if ATTEMPT == 1:
    sys.exit(75)
"""
    run = runs.start(REPORT + attempts, QUICK_RESTARTS)
    result = succeeded(run)
    assert (result["warnings"], result["checkpointStep"]) == (["host 1 is slow"], 2)
    assert run.stdout.count("warning: host 1 is slow\n") == 1


def test_a_worker_that_cannot_be_started_fails_the_run(runs: Runs) -> None:
    changes = {"trainer.command": ["python", "a\0b"], "runPolicy.restart.limits": [{"class": "Unknown", "max": 0}]}
    run = runs.start("", changes)
    assert run.wait() == 1
    assert run.result()["failure"]["message"] == "embedded null byte"


def test_processes_left_behind_by_a_worker_end_with_it(runs: Runs) -> None:
    script = """
child = HERE / "child.py"
child.write_text("import signal; signal.pause()")
tell("child", subprocess.Popen([sys.executable, str(child)]).pid)
"""
    run = runs.start(script)
    succeeded(run)
    assert run.has_told("child")
    run.wait_until_nothing_survives()


def test_an_earlier_run_in_the_same_directory_leaves_no_traces(runs: Runs) -> None:
    first = runs.start(TRAIN)
    succeeded(first)
    (first.out / "model.safetensors").write_bytes(b"weights")
    second = runs.start("sys.exit('this run trains nothing')", arguments=["--output-dir", "out", "--overwrite"])
    assert second.wait() == 1
    result = second.result()
    assert result["failure"]["message"] == "this run trains nothing"
    assert result["lossCurve"] == []
    assert not (first.out / "report.html").exists()
    assert "report.html" not in second.stdout
    assert not (first.out / "model.safetensors").exists()


def test_a_directory_that_holds_another_run_is_refused(runs: Runs) -> None:
    first = runs.start("pass")
    succeeded(first)
    before = first.result()
    second = runs.start("pass")
    assert second.wait() == 2
    assert "--output-dir out holds another" in second.stderr
    assert "--overwrite" in second.stderr
    assert second.result() == before


def test_a_directory_in_which_another_run_is_under_way_is_refused_even_to_replace_it(runs: Runs) -> None:
    first = runs.start("tell('ready'); wait_forever()")
    first.told("ready", 0)
    second = runs.start("pass", arguments=["--output-dir", "out", "--overwrite"])
    assert second.wait() == 2
    assert "another `tpujob run` is using" in second.stderr
    first.interrupt()
    assert first.wait() == 130


def test_a_directory_of_a_run_without_a_result_is_refused(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "out" / "pods").mkdir(parents=True)
    run = runs.start_job(tmp_path, job_body({"trainer.entrypoint": "json:loads"}))
    assert run.wait() == 2
    assert "--output-dir out holds another" in run.stderr


def test_what_the_workers_print_is_kept_and_shown_on_request(runs: Runs) -> None:
    script = r"print(f'hello from {HOST}\x1b[2J'); print('and say so', file=sys.stderr); print('no newline', end='')"
    run = runs.start(script, hosts=2, arguments=["--output-dir", "out", "--verbose"])
    succeeded(run)
    for host in (0, 1):
        assert f"digits-1-0-{host}: hello from {host}\n" in run.stdout
        assert f"digits-1-0-{host}: no newline" in run.stdout
        log = (run.out / "pods" / f"digits-1-0-{host}" / "log.txt").read_text()
        assert sorted(log.splitlines()) == ["and say so", f"hello from {host}\x1b[2J", "no newline"]


def test_a_job_that_this_machine_cannot_hold_is_refused_with_one_that_fits(runs: Runs, tmp_path: Path) -> None:
    body = job_body(
        {"slice.acceleratorType": "v5p-12288", "recipe.globalBatchSize": 6144, "trainer.entrypoint": "json:loads"}
    )
    run = runs.start_job(tmp_path, body)
    assert run.wait() == 1
    assert "spec.slice: 1536 hosts " in run.stderr
    assert re.search(r"--slice v5p-\d+", run.stderr)


def test_two_simultaneous_runs_of_a_job_are_independent(runs: Runs) -> None:
    script = """
sibling = HERE.parent / os.environ["SIBLING"]
with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
    tell("met")
    while not (sibling / "told.met.1.0.json").exists(): time.sleep(0.01)
    last = pathlib.Path(os.environ["TPUJOB_TERMINATION_LOG"])
    last.write_text(json.dumps({"step": 300, "metrics": {"name": len(HERE.name)}}))
    tell("done")
    while not (sibling / "told.done.1.0.json").exists(): time.sleep(0.01)
"""
    started = [
        runs.start(script, name=name, environ={"SIBLING": sibling}) for name, sibling in [("a", "bbb"), ("bbb", "a")]
    ]
    assert [succeeded(run)["metrics"] for run in started] == [{"name": 1.0}, {"name": 3.0}]


def test_an_unreadable_history_prints_one_line_and_does_not_fail_the_run(runs: Runs) -> None:
    run = runs.start('(pathlib.Path(os.environ["TPUJOB_REPORT_DIRECTORY"]) / "history.json").write_text("{}")')
    succeeded(run)
    assert "history.json: schema: " in run.stderr
    assert not (run.out / "report.html").exists()


def test_a_result_that_could_not_be_written_is_no_success(runs: Runs) -> None:
    """A script that goes on after exit status 0 reads the result."""
    run = runs.start("(HERE / 'out' / 'result.json').symlink_to('/dev/full')\n" + TRAIN)
    assert run.wait() == 1
    assert "result.json: no space left on device" in run.stderr
    assert not (run.out / "result.json").is_symlink()


def test_plain_output_shows_how_the_run_went_without_escape_codes(runs: Runs) -> None:
    until_it_is_shown = """
report(150, loss=0.5, metrics={"accuracy": 0.5}, warnings=["host 1 is slow"])
while not (HERE / "shown").exists(): time.sleep(0.01)
"""
    run = runs.start(REPORT + until_it_is_shown + TRAIN, environ={"TERM": "xterm-256color"})
    run.wait_for_output("  metrics: accuracy 0.5")
    (run.directory / "shown").touch()
    succeeded(run)
    assert "trained 5000 steps" in (run.out / "report.html").read_text(encoding="utf-8")
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in run.stdout.splitlines()]
    course = [
        "  metrics: accuracy 0.5",
        "  warning: host 1 is slow",
        f"  warning: {WARNINGS[0]}",
        "  accuracy   0.75",
        "  warning    host 1 is slow",
        f"  warning    {WARNINGS[0]}",
        "  checkpoint step 250",
        "  best       accuracy 0.875 at step 200, step-00000200-0b9e5a3c-1",
        "  report     out/report.html",
        "  logs       out/pods/*/log.txt",
        "  result     out/result.json",
    ]
    assert [line for line in lines if line in course] == course
    assert re.search(r"^Succeeded in \d+ s, 1 attempt$", run.stdout, re.MULTILINE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", run.stdout + run.stderr)


@pytest.mark.parametrize("taken", ["a file", "below a file"])
def test_an_output_directory_that_cannot_be_made_is_refused_before_the_start(runs: Runs, taken: str) -> None:
    where = {"a file": "job.json", "below a file": "job.json/out"}[taken]
    run = runs.start("", arguments=["--output-dir", where])
    assert run.wait() == 2
    assert f"--output-dir {where}: " in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.has_told("started")


def test_a_program_that_does_not_exist_is_refused_before_the_start(runs: Runs) -> None:
    run = runs.start("", {"trainer.command": ["no-such-program"]})
    assert run.wait() == 1
    assert "spec.trainer.command[0]: " in run.stderr
