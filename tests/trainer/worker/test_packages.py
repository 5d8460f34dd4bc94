"""requirements.txt in trainer.code, with the real uv: what is installed, what the image keeps, and what is refused."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.trainer.checkpoint.conftest import BUCKET, object_storage
from tests.trainer.checkpoint.refusing_server import answering
from tests.trainer.gang_processes import Launcher, run_spec
from tests.trainer.progress_service import progress_service
from tests.trainer.worker.test_archive import file, packed
from tests.trainer.worker.test_code import TASK, here, put, start_command, worker
from tests.wheels import write_wheel
from tpu_contract.protocol import ENV_PACKAGES, ExitCode, PackageSource
from tpu_contract.run_spec import CodeSpec
from tpu_trainer.contract.errors import StorageError, TrainerError, UserCodeError
from tpu_trainer.storage import open_store
from tpu_trainer.worker.code import install
from tpu_trainer.worker.packages import install_packages

__all__ = ["here", "object_storage"]

WHEEL = "wheels/tiny_rates-1.2-py3-none-any.whl"
NUMPY = metadata.version("numpy")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A host's unpacked code, which asks for a package that its wheelhouse has and for one that the image has."""
    folder = tmp_path / "host" / "code"
    write_wheel(folder / "wheels")
    (folder / "requirements.txt").write_text("tiny-rates>=1  # pinned by the wheelhouse\nnumpy\n")
    return folder


def added(code: Path, **environ: str) -> tuple[str, ...]:
    installed = install_packages(code, {**os.environ, **environ})
    assert installed is not None
    return installed[1]


def refusal(code: Path, requirements: str | None = None, **environ: str) -> TrainerError:
    if requirements is not None:
        (code / "requirements.txt").write_text(requirements)
    with pytest.raises(TrainerError) as raised:
        install_packages(code, {**os.environ, **environ})
    return raised.value


def test_what_the_image_lacks_is_added_beside_it_and_nothing_else(code: Path) -> None:
    assert added(code) == ("tiny-rates==1.2",)
    packages = code.parent / "packages"
    assert (packages / "tiny_rates.py").exists()
    assert [path.name for path in packages.glob("*.dist-info")] == ["tiny_rates-1.2.dist-info"]
    # The user's folder is as it was.
    assert sorted(path.name for path in code.iterdir()) == ["requirements.txt", "wheels"]


def test_a_second_process_of_the_host_finds_it_done_unless_the_file_is_another(code: Path) -> None:
    added(code)
    for wheel in (code / "wheels").iterdir():
        wheel.unlink()
    assert added(code) == ("tiny-rates==1.2",)
    write_wheel(code / "wheels", "1.3")
    (code / "requirements.txt").write_text("tiny-rates==1.3\n")
    assert added(code) == ("tiny-rates==1.3",)


@pytest.mark.usefixtures("object_storage")
@pytest.mark.parametrize("place", ["{}", '"{}"  # ours'])
def test_a_line_names_a_wheelhouse_in_a_bucket(code: Path, tmp_path: Path, place: str) -> None:
    wheel = write_wheel(tmp_path, "1.4")
    open_store(f"gs://{BUCKET}/wheels").put(wheel.name, wheel.read_bytes())
    (code / "requirements.txt").write_text(f"-f {place.format(f'gs://{BUCKET}/wheels')}\ntiny-rates==1.4\n")
    assert added(code, **{ENV_PACKAGES: PackageSource.WHEELHOUSE}) == ("tiny-rates==1.4",)


def test_nothing_is_installed_without_the_file_and_where_the_environment_is_the_users(code: Path) -> None:
    assert install_packages(code, {ENV_PACKAGES: PackageSource.INSTALLED}) is None
    (code / "requirements.txt").unlink()
    assert install_packages(code, {}) is None
    assert not (code.parent / "packages").exists()


@pytest.mark.parametrize(
    "requirements",
    ["tiny-rates==1.2\nnumpy<2\n", "tiny-rates==2.0\n", "tiny-rates=1.2\n"],
    ids=["image", "none", "typo"],
)
def test_what_cannot_be_fulfilled_is_the_users_error_in_the_words_of_uv(
    code: Path, requirements: str, snapshot: SnapshotAssertion
) -> None:
    error = refusal(code, requirements)
    assert isinstance(error, UserCodeError)
    assert str(error).replace(NUMPY, "NUMPY").replace(str(code), "CODE") == snapshot


def test_a_package_that_needs_another_numpy_than_the_images_is_refused(code: Path) -> None:
    write_wheel(code / "wheels", "1.5", requires="numpy<2")
    error = refusal(code, "tiny-rates==1.5\n")
    assert isinstance(error, UserCodeError)
    assert f"numpy=={NUMPY}" in str(error)


def test_without_an_index_the_message_says_where_wheels_may_be(code: Path, snapshot: SnapshotAssertion) -> None:
    wheels = code / "wheels"
    wheels.rename(code.parent / "elsewhere")
    error = refusal(code, **{ENV_PACKAGES: PackageSource.WHEELHOUSE})
    assert isinstance(error, UserCodeError)
    assert str(error) == snapshot


@pytest.mark.parametrize(
    ("status", "may_pass"), [(None, True), (503, True), (403, False), (404, False)], ids=lambda value: str(value)
)
def test_an_index_that_cannot_be_reached_is_no_error_of_the_user(
    code: Path, status: int | None, may_pass: bool
) -> None:
    (code / "wheels").rename(code.parent / "elsewhere")
    with answering(status or 500, "") as address:
        # Nothing listens at port 9.
        index = f"http://{address if status else '127.0.0.1:9'}/simple"
        error = refusal(code, UV_DEFAULT_INDEX=index, UV_HTTP_RETRIES="0", UV_NO_CACHE="1")
    assert isinstance(error, StorageError if may_pass else UserCodeError), error
    assert str(error).startswith("requirements.txt")


def test_an_image_without_uv_says_so(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(code / "python"))
    assert "the image has no uv" in str(refusal(code, PATH=""))


@pytest.mark.usefixtures("here")
def test_a_package_that_hides_a_module_of_the_trainer_is_the_users_error(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, module="json", text="def main(): ...\n").read_bytes()
    archive = packed(file("train.py"), file("requirements.txt", b"tiny-rates"), file(WHEEL, wheel))
    with pytest.raises(UserCodeError, match=r"^requirements.txt: .* json.py .*; leave out the package"):
        install(
            CodeSpec(**put(tmp_path / "a.tar.gz", archive)), worker(tmp_path / "host"), {}, ["tpu_trainer.worker.host"]
        )


@pytest.mark.usefixtures("here")
def test_a_folder_that_is_installed_as_editable_is_found(tmp_path: Path) -> None:
    """`-e .` leaves such a file for code below src/."""
    source = tmp_path / "host" / "code" / "src"
    wheel = write_wheel(tmp_path, pth=f"{source}\nimport os\n/nowhere\n").read_bytes()
    archive = packed(file("src/mine.py"), file("requirements.txt", b"tiny-rates"), file(WHEEL, wheel))
    environ: dict[str, str] = {}
    directory = install(CodeSpec(**put(tmp_path / "a.tar.gz", archive)), worker(tmp_path / "host"), environ)
    assert environ["PYTHONPATH"].split(":") == [str(directory), str(tmp_path / "host" / "packages"), str(source)]


def test_a_command_has_the_packages_and_their_programs(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path).read_bytes()
    archive = packed(file("requirements.txt", b"tiny-rates\n"), file(WHEEL, wheel))
    # The program's first line names the Python of the image, which has the image's packages, too.
    ended = start_command(tmp_path, put(tmp_path / "code.tar.gz", archive), "tiny-rates")
    assert ended.stdout.splitlines()[-1] == "tiny rates 1.2", ended.stderr


def test_a_run_imports_the_package_and_reports_the_hash(launcher: Launcher, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path).read_bytes()
    task = b"import tiny_rates\n" + TASK
    archive = packed(file("mine.py", task), file("requirements.txt", b"tiny-rates==1.2\n"), file(WHEEL, wheel))
    document = run_spec(entrypoint="mine:task", replicas=1)
    document["code"] = put(tmp_path / "code.tar.gz", archive)
    with progress_service(tmp_path) as service:
        gang = launcher.start(document, TPUJOB_CODE_DIRECTORY=str(tmp_path / "host"), **service.environment)
        assert gang.wait() == [ExitCode.Succeeded], gang.output()
        told = service.wait_for(lambda said: "packagesSha256" in said)
    assert told["packagesSha256"] == hashlib.sha256(b"tiny-rates==1.2").hexdigest()
