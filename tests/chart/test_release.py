"""`make dist`: what is in it, that it installs, and that the same commit gives the same bytes."""

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from release.__main__ import main
from release.distribution import make
from release.errors import ReleaseError
from release.images import OPERATOR, TRAINER
from release.source import Source
from tests.chart.helm import FULL_NAME, NAMESPACE, RELEASE, REPOSITORY, Helm, container, declared, parsed
from tests.chart.registry import serving
from tests.cluster import oci
from tests.cluster.control_plane import ControlPlane

REGISTRY = "registry.example/team"
DEFINITION = "crd/tputrainingjobs.tpu-operator.dev"


def small_image(source: Source, dockerfile: Path, name: str, archive: Path) -> None:
    """In place of docker: an image whose only layer is its Dockerfile."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        content = source.read(dockerfile).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    oci.write_image(archive, name, [layer], {})
    layer.unlink()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    make(REPOSITORY, folder, REGISTRY, small_image, allow_changes=True)
    return folder


def the(dist: Path, pattern: str) -> Path:
    [found] = dist.glob(pattern)
    return found


def test_the_checksums_cover_every_other_file(dist: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    listed = {line[66:] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(dist)) for path in dist.rglob("*") if path.is_file()}
    assert there - listed == {"SHA256SUMS"}


def test_the_same_commit_gives_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    """At another time, in another place, with another umask. Images are not among them: their builds run pip."""
    before = os.umask(0o077)
    try:
        make(REPOSITORY, tmp_path / "again", REGISTRY, small_image, allow_changes=True)
    finally:
        os.umask(before)

    def sums(folder: Path) -> list[str]:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        return [line for line in lines if "  images/" not in line]

    assert sums(dist) == sums(tmp_path / "again")


def test_the_definition_is_the_one_in_crds(dist: Path) -> None:
    assert (dist / "tputrainingjobs.yaml").read_bytes() == (REPOSITORY / "crds/tputrainingjobs.yaml").read_bytes()


def manifest_digest(archive: Path) -> str:
    """Of the only image in an OCI archive, computed from the manifest itself."""
    with tarfile.open(archive) as tar:
        blobs = [tar.extractfile(name).read() for name in tar.getnames() if name.startswith("blobs/sha256/")]  # type: ignore[union-attr]
    [manifest] = [blob for blob in blobs if blob.startswith(b'{"schemaVersion"')]
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def test_the_chart_names_the_images_by_the_digests_that_they_have(dist: Path, helm: Helm) -> None:
    pinned = {
        name: f"{REGISTRY}/{name}@{manifest_digest(the(dist, f'images/{name}-*.tar'))}" for name in (OPERATOR, TRAINER)
    }
    archive = str(the(dist, "*.tgz"))
    assert container(parsed(helm.run("template", RELEASE, archive)))["image"] == pinned[OPERATOR]
    annotations = yaml.safe_load(helm.run("show", "chart", archive))["annotations"]
    listed = {one["name"]: one["image"] for one in yaml.safe_load(annotations["artifacthub.io/images"])}
    assert listed == pinned == json.loads((dist / "release.json").read_text())["images"]


def test_the_archive_renders_what_the_folder_renders(dist: Path, helm: Helm) -> None:
    archive = str(the(dist, "*.tgz"))
    helm.run("lint", "--strict", archive)
    place = ("--namespace", NAMESPACE)
    image = json.loads((dist / "release.json").read_text())["images"][OPERATOR]
    rendered = helm.run("template", RELEASE, archive, *place)
    assert rendered.count(image) == 2
    folder = helm.run("template", RELEASE, str(REPOSITORY / "charts" / "tpu-training-operator"), *place)
    tag, in_clone = json.loads((dist / "release.json").read_text())["tag"], declared()["version"]
    assert rendered.replace(image, f"localhost/{OPERATOR}:{tag}").replace(tag, in_clone) == folder


def test_the_chart_s_readme_has_the_defaults_of_the_archive(dist: Path, helm: Helm) -> None:
    assert f"`{REGISTRY}/{OPERATOR}`" in helm.run("show", "readme", str(the(dist, "*.tgz")))


@pytest.fixture
def place(control_plane: ControlPlane, helm: Helm, namespaces: None) -> Iterator[tuple[str, ...]]:
    place = ("--namespace", NAMESPACE, f"--kubeconfig={control_plane.kubeconfig}")
    yield place
    helm.run("uninstall", RELEASE, "--ignore-not-found", *place)
    control_plane.kubectl("delete", DEFINITION, "--ignore-not-found")


def test_helm_installs_from_the_layout_behind_a_registry(
    dist: Path, helm: Helm, control_plane: ControlPlane, place: tuple[str, ...]
) -> None:
    about = json.loads((dist / "release.json").read_text())
    with serving(dist / "chart-oci", f"charts/{OPERATOR}") as reference:
        pulled = helm.run("install", RELEASE, reference, "--plain-http", "--version", about["tag"], *place)
    assert "STATUS: deployed" in pulled
    found = control_plane.kubectl("get", f"deployment/{FULL_NAME}", "--namespace", NAMESPACE, "--output=json")
    assert container([json.loads(found.stdout)])["image"] == about["images"][OPERATOR]


def test_the_wheel_installs_without_network_and_runs_a_job_without_the_clone(dist: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    uv = [str(Path(sys.executable).with_name("uv")), "--offline", "--quiet", "--no-cache"]
    run([*uv, "venv", f"--python={sys.executable}", str(environment)])
    python = environment / "bin" / "python"
    run([*uv, "pip", "install", "--no-deps", f"--python={python}", str(the(dist, "*.whl"))])
    # The dependencies are those of this environment; the project itself is there in another way, which a .pth skips.
    where = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    Path(where, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    tpujob, example = str(environment / "bin" / "tpujob"), tmp_path / "example"
    shutil.copytree(REPOSITORY / "examples" / "first", example)
    (tmp_path / "empty").mkdir()
    at = {"cwd": tmp_path / "empty"}
    job = [str(example / "job.yaml"), "--set=trainer.backend=Torch", "--slice=v5litepod-4"]
    assert '"globalBatchSize": 32' in run([tpujob, "plan", *job, "--output=json"], **at)
    # The table of the images is a file of the package.
    code = (example / "train.py").read_text()
    (example / "train.py").write_text(f"{code}\nimport timm\n")
    run([tpujob, "validate", *job, f"--code={example}"], **at, warns="lacks what the code imports: timm")
    (example / "train.py").write_text(code)
    assert "Succeeded" in run([tpujob, "run", *job, f"--code={example}", "--steps=4"], **at)
    for package in ("tpu_training_operator", "tpu_trainer"):
        file = run([str(python), "-c", f"import {package}; print({package}.__file__)"])
        assert file.startswith(str(environment)), package


def run(command: list[str], cwd: Path | None = None, warns: str = "") -> str:
    done = subprocess.run(command, env={"PATH": os.defpath}, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert warns in done.stderr
    return done.stdout


# The bill of materials


@pytest.fixture(scope="module")
def bill(dist: Path) -> dict[str, Any]:
    return dict(json.loads(the(dist, "*.cdx.json").read_text()))


def test_the_bill_of_materials_is_one_that_cyclonedx_allows(bill: dict[str, Any]) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references)
    known = {bill["metadata"]["component"]["bom-ref"], *references}
    # What is not installed has dependencies that nobody knows, and CycloneDX leaves it out.
    installed = {one["bom-ref"] for one in bill["components"] if "licenses" in one}
    assert {edge["ref"] for edge in bill["dependencies"]} == installed | {bill["metadata"]["component"]["bom-ref"]}
    assert {on for edge in bill["dependencies"] for on in edge["dependsOn"]} <= known


def test_it_lists_what_the_constraints_of_both_stacks_pin_with_every_hash(bill: dict[str, Any]) -> None:
    listed = {
        f"{one['name']}=={one['version']}": [
            entry["content"] for reference in one["externalReferences"] for entry in reference["hashes"]
        ]
        for one in bill["components"]
    }
    assert listed == pins("constraints.torch_tpu.txt") | pins("constraints.txt")


def test_it_tells_what_the_second_stack_alone_has(bill: dict[str, Any]) -> None:
    second = {
        f"{one['name']}=={one['version']}": one["scope"]
        for one in bill["components"]
        if {"name": "tpu-operator.dev:stack", "value": "torch_tpu"} in one.get("properties", ())
    }
    assert second.keys() == pins("constraints.torch_tpu.txt").keys() - pins("constraints.txt").keys()
    assert {"torch==2.15.0", "torch-tpu==0.2.0"} <= second.keys()
    assert set(second.values()) == {"optional"}


def pins(path: str) -> dict[str, list[str]]:
    entries = re.split(r"\n(?=\S)", (REPOSITORY / path).read_text().strip())
    return {re.match(r"[^\s;]+", entry)[0]: re.findall(r"sha256:([0-9a-f]{64})", entry) for entry in entries}


def test_it_tells_what_is_shipped_from_what_only_tests_us(bill: dict[str, Any]) -> None:
    scope = {one["name"]: one["scope"] for one in bill["components"]}
    in_the_image = set(re.findall(r"^([^\s=]+)==", (REPOSITORY / "operator/requirements.txt").read_text(), re.M))
    assert {name for name, value in scope.items() if value == "required"} == in_the_image
    assert {scope[name] for name in ("torch", "torch-xla", "numpy", "transformers", "libtpu", "jax")} == {"optional"}
    assert {scope[name] for name in ("pytest", "ruff", "mypy", "sphinx")} == {"excluded"}


def test_it_knows_the_licence_of_whatever_is_installed(bill: dict[str, Any]) -> None:
    """What is not is for other platforms and Pythons; that is said in its place."""
    installed = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions()}
    for one in bill["components"]:
        here = installed.get(one["name"]) == one["version"]
        said = [entry["name"] for entry in one.get("properties", ())]
        assert ("licenses" in one, "tpu-operator.dev:license" in said) == (here, not here), one["name"]
    licence = {one["name"]: one["licenses"][0] for one in bill["components"] if "licenses" in one}
    assert licence["click"] == {"license": {"id": "BSD-3-Clause"}}
    assert licence["aiohttp"] == {"expression": "Apache-2.0 AND MIT"}


# What is refused


Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path) -> Refusal:
    def refused(repository: Path = REPOSITORY, registry: str = REGISTRY, **options: Any) -> str:
        with pytest.raises(ReleaseError) as error:
            make(repository, tmp_path / "dist", registry, small_image, **options)
        assert sorted(path.name for path in tmp_path.iterdir() if path != repository) == []
        return str(error.value)

    return refused


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of two files, one of which has changed."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("kept", "changed"):
        (folder / name).write_text("as committed")
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.example", "commit", "--quiet", "--message=first"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    (folder / "changed").write_text("since")
    return folder


def test_a_tree_with_changes_is_refused(refusal: Refusal, clone: Path) -> None:
    message = refusal(clone)
    assert " M changed" in message
    assert "CHANGES=allowed" in message


def test_a_tracked_file_that_is_gone_is_named(refusal: Refusal, clone: Path) -> None:
    (clone / "kept").unlink()
    assert refusal(clone, allow_changes=True).startswith("kept: git tracks this file, and it is not there")


def test_what_is_no_clone_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert "not a git repository" in refusal(tmp_path / "plain")


@pytest.mark.parametrize(
    "registry", ["", "oci://registry.example", "registry.example/", "Registry.example/Team", "a b"]
)
def test_what_is_no_registry_is_refused(refusal: Refusal, registry: str) -> None:
    assert "right would be registry.example/team" in refusal(registry=registry)


@pytest.mark.parametrize("epoch", ["yesterday", "0", "-1", "99999999999"])
def test_a_time_that_no_wheel_can_bear_is_refused(
    refusal: Refusal, clone: Path, monkeypatch: pytest.MonkeyPatch, epoch: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    assert f"SOURCE_DATE_EPOCH: '{epoch}'" in refusal(clone, allow_changes=True)


def test_without_images_the_chart_names_the_tag_and_the_release_says_what_is_missing(
    tmp_path: Path, helm: Helm, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "of-the-last.whl").touch()
    assert main([f"--registry={REGISTRY}", "--without-images", "--allow-changes", f"--into={folder}"]) == 0
    assert "left out: images: the chart names a tag, and no digest" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]
    assert not (folder / "of-the-last.whl").exists()
    about = json.loads((folder / "release.json").read_text())
    image = container(parsed(helm.run("template", RELEASE, str(the(folder, "*.tgz")))))["image"]
    assert image == f"{REGISTRY}/{OPERATOR}:{about['tag']}"


def test_a_failed_release_leaves_the_last_one_as_it_was(dist: Path, clone: Path) -> None:
    before = sorted(dist.rglob("*"))
    with pytest.raises(ReleaseError):
        make(clone, dist, REGISTRY, small_image)
    assert sorted(dist.rglob("*")) == before


def test_without_a_builder_the_images_are_missed_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "release", f"--registry={REGISTRY}"],
        cwd=REPOSITORY,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("make dist: docker (with buildx), podman and buildah: not here")
    assert "WITHOUT=images" in done.stderr


def test_charts_of_two_commits_name_two_images(tmp_path: Path, helm: Helm) -> None:
    """`make images` tags the images and writes the chart, so an upgrade from a newer clone replaces the pod."""
    for part in ("charts", "operator/tpu_training_operator/version.py", "pyproject.toml", "Makefile"):
        copy = shutil.copytree if (REPOSITORY / part).is_dir() else shutil.copyfile
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        copy(REPOSITORY / part, tmp_path / part)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)

    def image(message: str) -> str:
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", f"--message={message}"], check=True)
        make = ["make", "-s", "-C", str(tmp_path), f"REGISTRY={REGISTRY}"]
        subprocess.run([*make, "chart"], check=True)
        tag = subprocess.run([*make, "tag"], check=True, capture_output=True, text=True).stdout.strip()
        found = container(parsed(helm.run("template", RELEASE, str(tmp_path / "build" / "chart"))))["image"]
        assert found == f"{REGISTRY}/{OPERATOR}:{tag}"
        return tag

    older, newer = image("older"), image("newer")
    assert older != newer
    assert re.fullmatch(rf"{declared()['version']}\.g[0-9a-f]{{7}}", newer)
