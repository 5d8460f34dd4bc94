"""Runs the chart through the real helm, like a user, with shorthands for what it renders."""

import json
import os
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "tpu-training-operator"
RELEASE = "tpu"
NAMESPACE = "tpu-system"
FULL_NAME = "tpu-tpu-training-operator"
# The APIs of a cluster with a Prometheus operator, besides Kubernetes' own.
MONITORING = ("monitoring.coreos.com/v1", "monitoring.googleapis.com/v1")

# Ten times faster, where PyYAML was built with libyaml: the definition alone has thousands of lines.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def declared() -> Object:
    """Chart.yaml, whose version lacks the commit."""
    return dict(yaml.safe_load((CHART / "Chart.yaml").read_text()))


class Refused(Exception):
    """helm ended with an error; the message is its output."""


class Helm:
    """helm with its own home, so that no plugin or repository of the machine affects a test."""

    def __init__(self, program: Path, home: Path) -> None:
        self._program = program
        self._environment = {"PATH": os.defpath, "HOME": str(home)}
        self._rendered: dict[tuple[str, tuple[str, ...]], list[Object]] = {}

    def run(self, *arguments: str, values: Object | None = None) -> str:
        """The output of helm; `values` go in as a values file. Raises Refused."""
        command = [str(self._program), *arguments]
        if values is not None:
            command += ["--values", "-"]
        done = subprocess.run(
            command,
            input=yaml.safe_dump(values),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Refused(f"{done.stdout}{done.stderr}")
        return done.stdout

    def template(
        self, values: Object | None = None, apis: Iterable[str] = MONITORING, *, with_test: bool = False
    ) -> list[Object]:
        """The objects of release `tpu` in namespace `tpu-system`, for a cluster that has these APIs; with those that
        `helm test` creates or without. They are shared with other tests: do not change them."""
        flags = tuple(f"--api-versions={api}" for api in apis)
        asked = (json.dumps(values or {}, sort_keys=True), flags)
        if asked not in self._rendered:
            place = (RELEASE, str(CHART), "--namespace", NAMESPACE)
            self._rendered[asked] = parsed(self.run("template", *place, *flags, values=values or {}))
        return [item for item in self._rendered[asked] if with_test or not is_test(item)]


def parsed(rendered: str) -> list[Object]:
    """The objects in what helm renders."""
    documents = re.split(r"^---$", rendered, flags=re.MULTILINE)
    return [item for document in documents if (item := _object(document))]


@cache
def _object(document: str) -> Object | None:
    """Most values change one object of twenty, and the definition alone takes longer to read than helm to run."""
    return yaml.load(document, LOADER)  # type: ignore[no-any-return]


def is_test(item: Object) -> bool:
    """Whether `helm test` creates it."""
    return item["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"


def nested(path: str, value: Any) -> Object:
    """Values that set a single one: nested("image.tag", "1") is {"image": {"tag": "1"}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def named(objects: Iterable[Object], kind: str, name: str = FULL_NAME) -> Object:
    """The one object of this kind and name."""
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"] == name]
    return found


def pod(objects: Iterable[Object]) -> Object:
    """The operator's pod template."""
    (deployment,) = of_kind(objects, "Deployment")
    return dict(deployment["spec"]["template"])


def container(objects: Iterable[Object]) -> Object:
    """The operator's only container."""
    (only,) = pod(objects)["spec"]["containers"]
    return dict(only)
