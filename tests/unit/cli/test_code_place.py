"""Where packed code goes: the bucket of the checkpoints, what the user says, or a Secret while it fits."""

import json
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import ABSENT, job_body
from tpu_training_operator.api.constants import LARGEST_SECRET
from tpu_training_operator.api.trainer import Trainer
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.cli.code.entrypoint import find_problem
from tpu_training_operator.cli.code.option import code_warnings
from tpu_training_operator.cli.code.packing import PackedCode
from tpu_training_operator.cli.code.place import NoPlace, place_of, put
from tpu_training_operator.cli.common.errors import WrongOption
from tpu_training_operator.cli.common.job_file import load

SMALL = PackedCode(b"archive", {"train.py": 7})
FILE = f"code-{SMALL.sha256}.tar.gz"
SECRET = f"secret://digits-code-{SMALL.sha256[:10]}"


@pytest.mark.parametrize(
    ("checkpoint", "given", "uri"),
    [
        (None, None, SECRET),
        ("/mnt/checkpoints", None, SECRET),
        ("gs://bucket/run/", None, f"gs://bucket/run/default/digits/{FILE}"),
        ("gs://bucket/run", "secret", SECRET),
        ("gs://bucket/run", "gs://other/code/", f"gs://other/code/{FILE}"),
        (None, "/mnt/code", f"/mnt/code/{FILE}"),
    ],
)
def test_the_bucket_of_the_checkpoints_comes_before_a_secret(
    checkpoint: str | None, given: str | None, uri: str
) -> None:
    job = parse_job(job_body({"spec.checkpoint": {"uri": checkpoint}} if checkpoint else {}))
    assert place_of(SMALL, job, given) == uri


@pytest.mark.parametrize(("beyond", "fits"), [(0, True), (1, False)])
def test_a_secret_has_a_limit_and_a_bucket_is_the_way_out(beyond: int, fits: bool, snapshot: SnapshotAssertion) -> None:
    packed, job = PackedCode(bytes(LARGEST_SECRET + beyond), {"data.npy": 5_000_000}), parse_job(job_body())
    if fits:
        assert place_of(packed, job, None).startswith("secret://")
    else:
        with pytest.raises(NoPlace) as caught:
            place_of(packed, job, None)
        assert "1048577" in str(caught.value)
        assert "1048576" in str(caught.value)
        assert str(caught.value) == snapshot
    assert place_of(packed, job, "gs://bucket/code").startswith("gs://bucket/code/")


@pytest.mark.parametrize("given", ["s3://bucket/x", "relative", ""])
def test_another_place_is_refused(given: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(WrongOption) as caught:
        place_of(SMALL, parse_job(job_body()), given)
    assert str(caught.value) == snapshot


def test_a_directory_gets_the_whole_file_or_none(tmp_path: Path) -> None:
    put(b"archive", f"{tmp_path}/new/{FILE}")
    put(b"archive", f"{tmp_path}/new/{FILE}")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "new").iterdir()] == [(FILE, b"archive")]
    with pytest.raises(NoPlace, match="cannot be written there"):
        put(b"archive", f"{tmp_path}/new/{FILE}/below")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(NoPlace, match="cannot be written there"):
        put(SMALL.archive, str(tmp_path / FILE))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_program_in_the_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.sh").touch()
    trainer = Trainer(image="none", command=["./train.sh"])
    assert find_problem(trainer, [tmp_path]) is None
    assert find_problem(trainer, [tmp_path / "elsewhere"]) is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("random.py", "random.py has the name of a standard module: torch and all others that import random"),
        ("logging/__init__.py", "logging/__init__.py has the name of a standard module"),
        ("torch.py", "torch.py has the name of a package that the trainer imports: it would get yours; rename it"),
        ("numpy/__init__.py", "numpy/__init__.py has the name of a package that the trainer imports"),
        ("tools/json.py", None),
        ("tools/numpy/__init__.py", None),
        # Python goes on to the installed package.
        ("numpy/helpers.py", None),
        ("torch.md", None),
    ],
)
def test_a_file_that_hides_a_module_of_the_trainers_is_told(tmp_path: Path, name: str, said: str | None) -> None:
    body = job_body({"spec.trainer.entrypoint": "train:task"})
    (tmp_path / "job.yaml").write_text(json.dumps(body))
    warnings = code_warnings(load(tmp_path / "job.yaml"), PackedCode(b"archive", {name: 1, "train.py": 7}), [])
    assert [said is not None and warning.startswith(said) for warning in warnings] == [True] * (said is not None)


@pytest.mark.parametrize(
    ("changes", "text", "is_told"),
    [
        ({}, "import torch\nfrom train import torch_xla_free\n", True),
        ({}, "import torch\ntry:\n    import torch_xla\nexcept ImportError: ...\n", False),
        ({}, "from transformers import Trainer\n", False),
        ({"spec.trainer.command": ["python", "./train.py", "--lr", "1"]}, "import torch\n", True),
        ({"spec.trainer.command": ["python", "-m", "package.train"]}, "import torch\n", False),
        ({"spec.slice.hardware": "CPU"}, "import torch\n", False),
    ],
)
def test_a_script_that_leaves_the_chips_idle_is_told(
    tmp_path: Path, changes: dict[str, Any], text: str, is_told: bool
) -> None:
    own_loop = {"spec.trainer.entrypoint": ABSENT, "spec.trainer.command": ["python", "train.py"]}
    (tmp_path / "job.yaml").write_text(json.dumps(job_body(own_loop | changes)))
    (tmp_path / "train.py").write_text(text)
    warnings = code_warnings(load(tmp_path / "job.yaml"), PackedCode(b"archive", {"train.py": 7}), [tmp_path])
    assert any("train.py trains on the hosts' CPUs, beside idle chips" in one for one in warnings) == is_told
