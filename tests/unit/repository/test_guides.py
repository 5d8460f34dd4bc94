"""The commands of the guides that put one's own names into the examples leave no placeholder, and a valid job."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tpu_training_operator.api.validation import parse_job

ROOT = Path(__file__).parents[3]
NAMES = {"REGISTRY": "registry.internal/team/training", "BUCKET": "our-data", "NAMESPACE": "vision"}
PLACEHOLDERS = ("localhost", "registry.example", "my-bucket", "research")


@pytest.mark.parametrize("page", ["gke.md", "install.md"])
def test_no_placeholder_is_left(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    # Up to the file that it reads; what becomes of the output is left out.
    (command,) = re.findall(r'^sed ".*?"\s[\\\s]*examples/\S+\.yaml', text, re.MULTILINE | re.DOTALL)

    made = subprocess.run(
        ["bash", "-euc", command],
        cwd=ROOT,
        env=NAMES | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )

    job = parse_job(yaml.safe_load(made.stdout))
    assert job.spec.trainer.image == f"{NAMES['REGISTRY']}/tpu-examples:1"
    assert [placeholder for placeholder in PLACEHOLDERS if placeholder in made.stdout] == []
