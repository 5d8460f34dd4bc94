"""Bad input to `tpujob`: exit status 1 or 2 (usage), the file, the place, what would be right. Never a traceback."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import ABSENT, job_body
from tpu_training_operator.cli.common import yaml_text
from tpu_training_operator.cli.main import _COMMANDS, main

PROGRAM = "from tpu_training_operator.cli.main import main; main()"

JOB = yaml.safe_dump(job_body())


def tpujob(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def told(result: Result, source: Path) -> str:
    """The one line on stderr, without its beginning; there is nothing on stdout."""
    assert result.exit_code == 1, result.output
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


def refusal(path: Path) -> str:
    """Returns the message with which every command that reads a job refuses this one."""
    [message] = {told(tpujob(command, "-f", path), path) for command in ("plan", "validate", "run")}
    return message


FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it holds nothing"),
    "a comment": (b"# only a comment\n", "it holds nothing"),
    "words": (b"just words\n", "it holds none"),
    "a list": (b"- a\n- list\n", "it holds a list"),
    "two jobs": (f"{JOB}---\n{JOB}".encode(), "it holds 2"),
    "a brace without its end": (b"spec:\n  slice: {acceleratorType: v3-8\n", "line 3, column 1"),
    "a tab": (b"spec:\n\tslice: 1\n", "line 2, column 1"),
    "an undefined alias": (b"a: *nothing\n", "line 1, column 4"),
    "an object of Python": (b"a: !!python/object:os.system {}\n", "line 1, column 4"),
    "a field twice": (b"a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "line 5, column 3"),
    "no date": (b"a: 2024-13-45\n", "1..12"),
    "5000 digits": (b"a: " + b"1" * 5000, "not valid YAML"),
    "a zero byte": (b"a: \0", "not valid YAML"),
    "a billion laughs": (laughs("[{}]"), "line 7, column 25"),
    "a billion merges": (laughs("{{<<: [{}]}}"), "line 7, column 30"),
    "an alias of itself": (b"a: &a [1, *a]\n", "line 1, column 11"),
    "a deep list": (b"a: " + b"[" * 200_000, "line 1, column 202"),
    "16 MiB": (b"#" * 2**24 + b"#", "16777216"),
    "bytes": (b"\x80\x81\xfe\xff", "UTF-8"),
    "Latin-1": ("é".encode("latin-1"), "UTF-8"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_one_job_is_refused(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    content, fact = FILES[name]
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    message = refusal(path)
    assert fact in message
    assert message == snapshot


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing.yaml") == "no such file or directory"
    assert refusal(tmp_path) == "is a directory"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ABSENT},
        {"spec.slice.acceleratorType": "v5litepod-17"},
        {"spec.recipe.globalBatchSize": 100},
        {"spec.slice.machineType": "n2"},
        {"metadata.name": "Digits"},
    ],
    ids=str,
)
def test_an_invalid_job_is_refused(tmp_path: Path, changes: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body(changes)))
    message = refusal(path)
    assert message.startswith(*changes)
    assert message == snapshot


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", [1]),
        ("labels", "team"),
        ("annotations", 5),
        ("labels", {5: "a"}),
        ("labels", {"a/b/c": "a"}),
        ("labels", {"team": 5}),
        ("annotations", {"team": None}),
        ("labels", {"kueue.x-k8s.io/queue-name": "a queue"}),
        ("namespace", "Team A"),
        ("namespace", 5),
    ],
    ids=str,
)
def test_metadata_that_the_api_server_would_refuse_is_refused(
    tmp_path: Path, field: str, value: Any, snapshot: SnapshotAssertion
) -> None:
    path, body = tmp_path / "job.yaml", job_body()
    body["metadata"][field] = value
    path.write_text(yaml.safe_dump(body))
    message = refusal(path)
    assert message.startswith(f"metadata.{field}")
    assert message == snapshot


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
    count, image = tpujob("validate", "-f", path).stderr.splitlines()
    assert count.startswith(f"tpujob: {path}: spec.slice.count: ")
    assert image.startswith(f"tpujob: {path}: spec.trainer.image: ")


NUMBERS = ["1e-3", "1E3", "1e+3", "1.5e-7", ".5e3", "5.e3", "0.001"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_for_kubectl_is_a_number_and_with_quotes_the_same_with_a_warning(tmp_path: Path, number: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("learningRate: 0.1", f"learningRate: {number}"))
    plain = tpujob("validate", "-f", path)
    assert (plain.exit_code, plain.stderr) == (0, "")
    path.write_text(JOB.replace("learningRate: 0.1", f"learningRate: '{number}'"))
    quoted = tpujob("validate", "-f", path)
    assert (quoted.exit_code, quoted.stdout) == (0, plain.stdout)
    assert quoted.stderr.startswith("warning: spec.recipe.optimizer.learningRate: write the number without quotes, as ")


def test_a_number_out_of_bounds_is_refused_with_what_would_be_right(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    path = tmp_path / "job.yaml"
    for number in ("-1.5e-7", "0", "1e400", ".nan", "1e19", "'0.1.2'"):
        path.write_text(JOB.replace("learningRate: 0.1", f"learningRate: {number}"))
        assert told(tpujob("validate", "-f", path), path) == snapshot


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
    assert (result.exit_code, "2 were given" in result.stderr) == (2, True)


def test_an_unknown_command_is_answered_with_the_nearest(snapshot: SnapshotAssertion) -> None:
    assert tpujob("plann").stderr == snapshot


@pytest.mark.parametrize("arguments", [["--help"], ["topologies"], ["crd"]], ids=" ".join)
def test_a_full_disk_is_reported_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    [line] = done.stderr.decode().splitlines()
    assert "no space left on device" in line


def test_an_interrupt_during_an_import_exits_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert (tpujob("plan").exit_code, tpujob("plan").output) == (130, "")


def test_help_lists_the_commands_with_their_own_help_texts() -> None:
    context = click.Context(main)
    for name, (_, help_text) in _COMMANDS.items():
        command = main.get_command(context, name)
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
    "trainer",
    [
        {"entrypoint": "digit:task"},
        {"entrypoint": "digits:tsk"},
        {"command": ["nonesuch"]},
    ],
    ids=str,
)
def test_missing_code_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text("def task(hp): ...\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.trainer": {"image": "x", **trainer}})))
    message = told(tpujob("run", "-f", path), path)
    [field] = trainer
    assert message.startswith(f"spec.trainer.{field}")
    assert message == snapshot
    assert not (tmp_path / "runs").exists()


def test_a_suspended_job_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.runPolicy.suspend": True})))
    message = told(tpujob("run", "-f", path), path)
    assert message.startswith("spec.runPolicy.suspend")
    assert message == snapshot


def test_an_output_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("def task(hp): ...\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({"spec.trainer.entrypoint": "digits:task"})))
    result = tpujob("run", "-f", path, "--output-dir", path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: --output-dir {path}: file exists"


def test_code_is_checked_with_its_job(tmp_path: Path) -> None:
    job, script = tmp_path / "job.yaml", tmp_path / "digits.py"
    job.write_text(yaml.safe_dump(job_body({"spec.trainer.entrypoint": "digits:task"})))
    script.write_text("for epoch in range(3):\n    loss().backward()\n")
    assert "it is a script" in told(tpujob("validate", job, "--code", tmp_path), job)
    script.write_text(script.read_text() + "def task(hp): ...\n")
    warned = tpujob("validate", job, "--code", tmp_path)
    assert (warned.exit_code, "executes line 2 (loss().backward())" in warned.stderr) == (0, True), warned.output
    (tmp_path / ".gitignore").write_text("digits.py\n")
    assert "no module digits is packed" in tpujob("validate", job, "--code", tmp_path).stderr
    assert tpujob("validate", job, "--code", tmp_path / "none").exit_code == 1
