"""`tpujob run --code`: a job finds here what it will find in a cluster, and nothing else."""

import hashlib
import importlib.metadata
from pathlib import Path

import pytest

from tests.contract.jobs import job_body
from tests.local.runs import Run, Runs
from tpu_training_operator.cli.code.packing import pack

OWN_LOOP = {"trainer.entrypoint": ..., "slice.acceleratorType": "v5litepod-8", "trainer.backend": "Torch"}
PRINTS = "import os, sys, helper\nprint('ran', sys.argv[1:], 'in', os.getcwd(), 'with', helper.__file__)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`job` is where `tpujob` runs: a helper there must not be found."""
    for place in ("job", "code"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "helper.py").touch()
    (tmp_path / "code" / "loop.py").write_text(PRINTS)
    return tmp_path / "code"


def start(runs: Runs, folder: Path, *arguments: str, **changes: object) -> Run:
    body = job_body(
        OWN_LOOP | {"trainer.command": ["python", "loop.py"], "trainer.args": ["$(TPUJOB_NUM_HOSTS)"]} | changes
    )
    return runs.start_job(folder.parent / "job", body, [*arguments, "--output-dir", "out"])


def test_every_host_unpacks_the_folder_and_runs_in_it_without_installing_anything(runs: Runs, folder: Path) -> None:
    (folder / "requirements.txt").write_text("numpy\nnot-there==1.2\nclick<1  # an old one\n")
    run = start(runs, folder, "--code", str(folder))
    assert run.wait() == 0, run.stdout + run.stderr
    (archive,) = run.out.glob("code-*.tar.gz")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert archive.name == f"code-{sha256}.tar.gz"
    assert run.result()["resolved"]["codeSha256"] == sha256
    here = importlib.metadata.version("click")
    assert f"requirements.txt asks for not-there==1.2, click<1 (here: {here}): workers of a cluster" in run.stdout
    for host in range(2):
        pod = (run.out / "pods" / f"digits-1-0-{host}").resolve()
        place = pod / "volumes" / "tpu-training-code" / "code"
        assert f"ran ['2'] in {place} with {place}/helper.py" in (pod / "log.txt").read_text()


@pytest.mark.parametrize("place", ["out", None])
def test_what_a_run_leaves_in_its_folder_is_no_code_of_the_next(runs: Runs, folder: Path, place: str | None) -> None:
    body = job_body(OWN_LOOP | {"trainer.command": ["python", "loop.py"]})
    run = runs.start_job(folder, body, ["--code", ".", *(["--output-dir", place] if place else [])])
    assert run.wait() == 0, run.stdout + run.stderr
    left = [path.relative_to(folder).as_posix() for path in folder.rglob("result.json")]
    assert [name.partition("/")[0] for name in left] == [place or "runs"]
    assert {"helper.py", "loop.py"} <= pack(folder).sizes.keys()
    assert [name for name in pack(folder).sizes if "/" in name] == []


def test_results_cannot_go_where_the_code_is(runs: Runs, folder: Path) -> None:
    body = job_body(OWN_LOOP | {"trainer.command": ["python", "loop.py"]})
    for place in (".", ".."):
        run = runs.start_job(folder, body, ["--code", ".", "--output-dir", place])
        assert run.wait() == 2
        assert "would be packed as code" in run.stderr


def test_a_file_that_is_ignored_is_missing_here_as_it_will_be_there(runs: Runs, folder: Path) -> None:
    (folder / ".gitignore").write_text("helper.py\n")
    run = start(runs, folder, "--code", str(folder))
    assert run.wait() == 1
    assert "No module named 'helper'" in run.result()["failure"]["message"]


def test_code_that_the_job_itself_names_is_fetched_and_checked(runs: Runs, folder: Path) -> None:
    first = start(runs, folder, "--code", str(folder))
    assert first.wait() == 0, first.stderr
    (archive,) = (path.rename(folder.parent / path.name) for path in first.out.glob("code-*.tar.gz"))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    code = {"trainer.code": {"uri": str(archive), "sha256": sha256}}
    assert start(runs, folder, "--overwrite", **code).wait() == 0
    archive.write_bytes(b"other")
    changed = start(runs, folder, "--overwrite", **code)
    assert changed.wait() == 1
    failure = changed.result()["failure"]
    assert (failure["class"], changed.result()["attempts"]) == ("UserError", 1)
    assert failure["message"].startswith(f"trainer.code.sha256: {archive} has the sha256")


def test_code_in_a_cluster_is_asked_for_here(runs: Runs, folder: Path) -> None:
    code = {"trainer.code": {"uri": "secret://digits-code", "sha256": "0a" * 32}}
    refused = start(runs, folder, **code)
    assert refused.wait() == 1
    assert "spec.trainer.code.uri:" in refused.stderr
