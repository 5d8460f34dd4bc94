"""The images of README's commands, in every node of a cluster: the operator's, and one for the examples without torch.

The operator's is built from its Dockerfile. In the examples' stands the environment of the tests, which the nodes share
with every container; copying its 7 GB into an image would test nothing more.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.cluster import oci
from tests.cluster.cluster import Cluster
from tests.cluster.images import Image, base_image_with, build_image
from tpu_training_operator.version import tag, version

_REPOSITORY = Path(__file__).parents[2]
# Containers see these at the same path as here: the environment, and the Python behind it.
SHARED = tuple(dict.fromkeys([_REPOSITORY, Path(sys.base_prefix)]))

OPERATOR = "localhost/tpu-training-operator"
EXAMPLES = "localhost/tpu-examples:1"

# With a thread for each core, which all wait for each other, a worker takes three times the CPU time.
_EXAMPLES_SETTINGS = {
    "Env": [
        f"PATH={sys.prefix}/bin:{oci.PATH}",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
        "OMP_NUM_THREADS=1",
    ],
    "WorkingDir": str(_REPOSITORY),
    "User": "65532:65532",
}


def build(into: Path) -> list[Image]:
    """The archives, in folder `into`. Raises MachineUnfit, ImageBuildError.

    Takes half a minute of CPU time; a third of that when only the code has changed.
    """
    # The containers find the trainer compiled; they could not keep what they compile themselves.
    folders = [str(_REPOSITORY / name) for name in ("contract", "trainer_image")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=True)
    # build/chart, which names the operator's image.
    subprocess.run(["make", "-s", "-C", str(_REPOSITORY), "chart"], check=True)
    operator, arguments = f"{OPERATOR}:{tag(version())}", {"VERSION": version()}
    return [
        build_image(_REPOSITORY / "operator" / "Dockerfile", _REPOSITORY, operator, arguments, into=into),
        # The environment may be below root's home, which is closed to others.
        base_image_with(EXAMPLES, "root", _EXAMPLES_SETTINGS, into=into),
    ]


def load(cluster: Cluster, images: Iterable[Image]) -> None:
    """Into a cluster whose nodes share SHARED, and have `base_image`."""
    for image in images:
        cluster.load_image(image.archive)
