"""Bad input to `tpujob`: exit status 2, the file, the place, what would be right. Never a traceback."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from tests.unit.jobs import ABSENT, job_body
from tpu_training_operator.cli.common import yaml_text
from tpu_training_operator.cli.main import _COMMANDS, main

PROGRAM = "from tpu_training_operator.cli.main import main; main()"

JOB = yaml.safe_dump(job_body())


def tpujob(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def told(result: Result, source: Path) -> str:
    """The one line on stderr, without its beginning; there is nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    [line] = result.stderr.splitlines()
    assert line.startswith(f"tpujob: {source}: ")
    assert result.stdout == ""
    return line.removeprefix(f"tpujob: {source}: ")


def laughs(level: str) -> bytes:
    """YAML that unfolds to a thousand million words. `level`: with {} for ten aliases of the level below."""
    aliases = [", ".join([f"*a{number}"] * 10) for number in range(9)]
    levels = [f"a{number}: &a{number} {level.format(below)}" for number, below in enumerate(aliases, start=1)]
    return "\n".join(["a0: &a0 {k: words}", *levels]).encode()


@pytest.mark.parametrize("command", ["plan", "validate", "run"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file must hold one TPUTrainingJob; it holds none"),
        (b"# only a comment\n", "the file must hold one TPUTrainingJob; it holds none"),
        (b"just words\n", "the file must hold one TPUTrainingJob; it holds none"),
        (b"- a\n- list\n", "the file must hold one TPUTrainingJob; it holds none"),
        (f"{JOB}---\n{JOB}".encode(), "the file must hold one TPUTrainingJob; it holds 2 of them"),
        (b"spec:\n  slice: {acceleratorType: v3-8\n", "line 3, column 1: not valid YAML: "),
        (b"spec:\n\tslice: 1\n", "line 2, column 1: not valid YAML: "),
        (b"a: *nothing\n", "line 1, column 4: not valid YAML: found undefined alias"),
        (b"a: !!python/object:os.system {}\n", "line 1, column 4: not valid YAML: "),
        (b"a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "line 5, column 3: not valid YAML: 'c' is given twice"),
        (b"a: 2024-13-45\n", "not valid YAML: month must be in 1..12"),
        (b"a: " + b"1" * 5000, "not valid YAML: "),
        (b"a: \0", "not valid YAML: "),
        (
            laughs("[{}]"),
            "line 7, column 25: not valid YAML: has more than 3145728 characters with all",
        ),
        (laughs("{{<<: [{}]}}"), "line 7, column 30: not valid YAML: has more than 3145728 characters with all"),
        (b"a: &a [1, *a]\n", "line 1, column 11: not valid YAML: *a contains itself"),
        (b"a: " + b"[" * 200_000, "line 1, column 202: not valid YAML: nested more than 200 levels deep"),
        (b"#" * 2**24 + b"#", "has more than 16777216 characters"),
        (b"\x80\x81\xfe\xff", "not a UTF-8 text file"),
        ("é".encode("latin-1"), "not a UTF-8 text file"),
    ],
)
def test_a_file_without_one_job_is_refused(tmp_path: Path, command: str, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert told(tpujob(command, "-f", path), path).startswith(message)


@pytest.mark.parametrize("command", ["plan", "validate", "run"])
def test_an_unreadable_file_is_refused(tmp_path: Path, command: str) -> None:
    missing = tmp_path / "missing.yaml"
    assert told(tpujob(command, "-f", missing), missing) == "no such file or directory"
    assert told(tpujob(command, "-f", tmp_path), tmp_path) == "is a directory"


@pytest.mark.parametrize("command", ["plan", "validate", "run"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": ABSENT}, "kind: is required"),
        ({"spec.slice.acceleratorType": "v5litepod-17"}, "spec.slice.acceleratorType: there is no accelerator type"),
        ({"spec.recipe.globalBatchSize": 100}, "spec.recipe.globalBatchSize: 100 does not divide over the 16"),
        ({"spec.slice.machineType": "n2"}, "spec.slice.machineType: 'n2' does not have this slice; it exists on"),
        ({"metadata.name": "Digits"}, "metadata.name must be at most 48 characters"),
    ],
)
def test_an_invalid_job_is_refused(tmp_path: Path, command: str, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body(changes)))
    assert told(tpujob(command, "-f", path), path).startswith(message)


@pytest.mark.parametrize("command", ["plan", "validate", "run"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("labels", [1], "metadata.labels: must be a mapping of names to strings"),
        ("labels", "team", "metadata.labels: must be a mapping of names to strings"),
        ("annotations", 5, "metadata.annotations: must be a mapping of names to strings"),
        ("labels", {5: "a"}, "metadata.labels: 5 is not a name such as team or example.com/team"),
        ("labels", {"a/b/c": "a"}, "metadata.labels: 'a/b/c' is not a name"),
        ("labels", {"team": 5}, "metadata.labels.team: 5 is not a string; put it into quotes"),
        ("annotations", {"team": None}, "metadata.annotations.team: None is not a string; put it into quotes"),
        ("labels", {"kueue.x-k8s.io/queue-name": "a queue"}, "metadata.labels.kueue.x-k8s.io/queue-name: 'a queue' is"),
        ("namespace", "Team A", "metadata.namespace: 'Team A' is not a name of at most 63 characters"),
        ("namespace", 5, "metadata.namespace: 5 is not a name"),
    ],
)
def test_metadata_that_the_api_server_would_refuse_is_refused(
    tmp_path: Path, command: str, field: str, value: Any, message: str
) -> None:
    path, body = tmp_path / "job.yaml", job_body()
    body["metadata"][field] = value
    path.write_text(yaml.safe_dump(body))
    assert told(tpujob(command, "-f", path), path).startswith(message)


def test_metadata_as_people_write_it_is_taken(tmp_path: Path) -> None:
    path, body = tmp_path / "job.yaml", job_body()
    body["metadata"] |= {
        "namespace": "team-a",
        "labels": {"app.kubernetes.io/part-of": "x_1.Y", "empty": ""},
        "annotations": {"example.com/note": "any text: ü"},
    }
    path.write_text(yaml.safe_dump(body, allow_unicode=True))
    assert tpujob("validate", path).exit_code == 0


def test_every_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.slice.count": 0, "spec.trainer.image": ABSENT})))
    assert tpujob("validate", "-f", path).stderr.splitlines() == [
        f"tpujob: {path}: spec.slice.count: 0 is too small; the minimum is 1",
        f"tpujob: {path}: spec.trainer.image: is required",
    ]


NUMBERS = ["1e-3", "1E3", "1e+3", "-1.5e-7", ".5e3", "5.e3", "0.001"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_for_kubectl_is_not_a_text(tmp_path: Path, number: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("learningRate: '0.1'", f"learningRate: {number}"))
    assert told(tpujob("validate", "-f", path), path).startswith("spec.recipe.optimizer.learningRate: ")
    path.write_text(JOB.replace("learningRate: '0.1'", f"learningRate: '{number.lstrip('-.')}'"))
    assert tpujob("validate", "-f", path).exit_code == (2 if number == "5.e3" else 0)


@pytest.mark.parametrize("text", ["1:30", "12:30:45", "1:30.5", "+1:2", "0x_", "0b", ":".join(["59"] * 50_000)])
def test_a_text_for_kubectl_is_not_a_number(text: str) -> None:
    assert yaml_text.load(f"a: {text}") == {"a": text}


def test_a_key_may_be_both_merged_and_given(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "x-base: &base {a: 1, b: 2}\nx-more: &more {<<: *base, b: 3}\nx-most: {<<: *more, a: 4}\n---\n" + JOB
    )
    assert tpujob("validate", "-f", path).exit_code == 0


def test_two_files_are_refused(tmp_path: Path) -> None:
    result = tpujob("validate", "-f", tmp_path / "a", "-f", tmp_path / "b")
    assert (result.exit_code, "one file is needed; 2 were given" in result.stderr) == (2, True)


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    assert "No such command 'plann'. Nearest: plan." in tpujob("plann").stderr


@pytest.mark.parametrize("arguments", [["--help"], ["topologies"], ["crd"]], ids=" ".join)
def test_a_full_disk_is_reported_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.decode()) == (2, "tpujob: no space left on device\n")


def test_an_interrupt_during_an_import_exits_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert (tpujob("plan").exit_code, tpujob("plan").output) == (130, "")


def test_help_lists_the_commands_with_their_own_help_texts() -> None:
    context = click.Context(main)
    for name, help_text in _COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(limit=200) == help_text


@pytest.mark.parametrize(
    ("arguments", "needless"),
    [
        (["--help"], {"pydantic", "kubernetes", "aiohttp", "rich", "yaml", "asyncio", "importlib.metadata"}),
        (["--version"], {"pydantic", "kubernetes", "aiohttp", "rich", "yaml", "asyncio"}),
        (["topologies"], {"pydantic", "kubernetes", "aiohttp", "rich", "yaml", "asyncio"}),
        (["crd"], {"kubernetes", "aiohttp", "rich", "asyncio"}),
        (["validate", "--help"], {"kubernetes", "aiohttp", "rich", "asyncio"}),
        (["plan", "--help"], {"kubernetes", "aiohttp", "asyncio"}),
        (["status", "--help"], {"rich"}),
        (["run", "--help"], {"kubernetes", "kopf"}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], needless: set[str]) -> None:
    report = f"import atexit, sys; atexit.register(lambda: print(*sorted({needless!r} & sys.modules.keys())))"
    done = subprocess.run([sys.executable, "-c", f"{report}; {PROGRAM}", *arguments], stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[-1] == ""


def test_the_operator_needs_no_kubeconfig_reader_in_a_pod() -> None:
    """Its image has none: kopf would load it, which takes 20 MiB."""
    program = (
        "import sys; sys.modules['kubernetes'] = None; import tpu_training_operator.main as main; print(main.main)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.stdout.startswith("<Command main>")


@pytest.mark.parametrize("arguments", [[], ["plan"], ["fly"], ["plan", "-f", "x", "-o", "xml"]])
def test_a_misused_command_prints_its_usage(arguments: list[str]) -> None:
    result = tpujob(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Usage: ")


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"entrypoint": "digit:task"}, "entrypoint: there is no module 'digit' in "),
        ({"entrypoint": "digits:tsk"}, "entrypoint: module 'digits' has no 'tsk'; nearest: task"),
        ({"command": ["nonesuch"]}, "command[0]: there is no program 'nonesuch' on this machine"),
    ],
)
def test_missing_code_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text("def task(hp): ...\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.trainer": {"image": "x", **trainer}})))
    assert told(tpujob("run", "-f", path), path).startswith(f"spec.trainer.{message}")
    assert not (tmp_path / "runs").exists()


def test_a_suspended_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.runPolicy.suspend": True})))
    assert told(tpujob("run", "-f", path), path) == (
        "spec.runPolicy.suspend: the job is suspended and would never start; set this to false to run it"
    )


def test_an_output_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("def task(hp): ...\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.trainer.entrypoint": "digits:task"})))
    result = tpujob("run", "-f", path, "--output-dir", path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: --output-dir {path}: file exists"
