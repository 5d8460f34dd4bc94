"""trainer.code: fetches the user's code, checks it, and makes it this host's working directory.

The operator never opens the archive; each host does, before any of the user's code runs. The folder replaces the
image's working directory: a module outside the folder is found only if it is installed or in PYTHONPATH. So a job that
finds its modules in `tpujob run --code` finds the same ones in the cluster.

The user's own loop starts as `python -m tpu_trainer run-command COMMAND...`, which becomes that command.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from tpu_contract.protocol import ENV_PACKAGES_SHA256, LARGEST_CODE_ARCHIVE, REQUIREMENTS_FILE
from tpu_contract.run_spec import CodeSpec
from tpu_trainer.contract.environment import WorkerEnvironment, read_environment, read_run_spec
from tpu_trainer.contract.errors import BadSpecError, StorageDeniedError, StorageError, UserCodeError
from tpu_trainer.contract.outcome import outcome_of, write_last_words
from tpu_trainer.storage import open_store
from tpu_trainer.worker.archive import BadArchiveError, unpack
from tpu_trainer.worker.packages import bin_path, digest, install_packages, module_paths

_MOUNTED = "secret://"
_SUBMIT_AGAIN = "submit it again (tpujob submit --code FOLDER --replace)"
_PACKAGES = frozenset(("numpy", "safetensors", "torch", "torch_tpu", "torch_xla", "tpu_contract", "tpu_trainer"))


def install(
    code: CodeSpec, environment: WorkerEnvironment, environ: MutableMapping[str, str], needed: Sequence[str] = ()
) -> Path:
    """Unpacks the code, installs its requirements.txt, and enters its folder, which is then first in sys.path and in
    PYTHONPATH, before the packages that were added.

    `needed`: modules that processes will import in that folder; they must find Python's and the image's, not the
    folder's.

    Raises:
        UserCodeError: the archive is missing, is not the one that the job names, is too large, cannot be unpacked, or
            has a module that would be imported in place of one that `needed` imports; or requirements.txt cannot be
            fulfilled.
        StorageError: the archive or the packages cannot be read, or their files cannot be written.
        BadSpecError: `code.uri` is not a kind of place that this trainer knows.
    """
    archive = _fetch(code, environment)
    sha256 = hashlib.sha256(archive).hexdigest()
    if sha256 != code.sha256:
        raise UserCodeError(
            f"trainer.code.sha256: {code.uri} has the sha256 {sha256}, and the job names {code.sha256}: the archive "
            f"was changed or cut off after the job was submitted; none of it was run; {_SUBMIT_AGAIN}"
        )
    directory = _unpack(code, archive, environment.code_directory)
    added = install_packages(directory, environ)
    places = [directory, *([] if added is None else module_paths(added[0]))]
    if needed:
        _refuse_hiding(directory, needed, f"trainer.code: {{}}; rename these files, {_SUBMIT_AGAIN}")
        for place in places[1:]:
            _refuse_hiding(place, needed, f"{REQUIREMENTS_FILE}: {{}}; leave out the package that brings it")
    _enter(places, environ)
    if added is not None:
        environ["PATH"] = bin_path(added[0], environ.get("PATH", ""))
        if (packages := digest(added[1])) is not None:
            environ[ENV_PACKAGES_SHA256] = packages
    print(f"runs trainer.code, sha256 {sha256}, in {directory}", flush=True)
    return directory


def _fetch(code: CodeSpec, environment: WorkerEnvironment) -> bytes:
    """Returns the archive; reads at most one byte more than is allowed."""
    if code.uri.startswith(_MOUNTED):
        if environment.code_archive is None:
            raise BadSpecError(f"trainer.code.uri: {code.uri} is not mounted in this worker")
        archive = _read(environment.code_archive, code.uri)
    elif code.uri.startswith("/"):
        archive = _read(Path(code.uri), code.uri)
    else:
        archive = _read_from_bucket(code.uri)
    if len(archive) > LARGEST_CODE_ARCHIVE:
        raise _too_large(code.uri)
    return archive


def _read(path: Path, uri: str) -> bytes:
    try:
        # Opening a named pipe would wait for its other end.
        if not path.is_file() and path.exists():
            raise UserCodeError(f"trainer.code.uri: {uri} is not a file; it must be a .tar.gz")
        with path.open("rb") as file:
            return file.read(LARGEST_CODE_ARCHIVE + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(uri) from None
    except PermissionError as error:
        raise StorageDeniedError(
            f"trainer.code.uri: {uri}: {error.strerror}: the worker runs as user {os.geteuid()} of group {os.getegid()}"
        ) from error
    except OSError as error:
        raise StorageError(f"trainer.code.uri: {uri}: {error.strerror}") from error


def _read_from_bucket(uri: str) -> bytes:
    folder, _, name = uri.rpartition("/")
    store = open_store(folder, "trainer.code.uri")
    size = store.list(name).get(name)
    if size is None:
        raise _missing(uri)
    if size > LARGEST_CODE_ARCHIVE:
        raise _too_large(uri)
    return store.read(name)


def _missing(uri: str) -> UserCodeError:
    return UserCodeError(f"trainer.code.uri: there is no {uri}: it was deleted, or never uploaded; {_SUBMIT_AGAIN}")


def _too_large(uri: str) -> UserCodeError:
    return UserCodeError(
        f"trainer.code.uri: {uri} has more than {LARGEST_CODE_ARCHIVE} bytes, the most that is allowed; keep data in "
        "data.uri"
    )


def _unpack(code: CodeSpec, archive: bytes, place: Path | None) -> Path:
    try:
        # The link-free path, as the working directory will be called.
        parent = Path(place or tempfile.mkdtemp(prefix="tpu-trainer-code-")).resolve()
        directory = parent / "code"
        # An earlier try may have left files on this disk.
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        unpack(archive, directory)
    except BadArchiveError as error:
        raise UserCodeError(f"trainer.code.uri: {code.uri}: {error}; {_SUBMIT_AGAIN}") from None
    except OSError as error:
        raise StorageError(f"trainer.code: cannot unpack {code.uri} on this host: {error.strerror}") from error
    return directory


def _refuse_hiding(directory: Path, needed: Sequence[str], message: str) -> None:
    """Refuses a folder that has a `json` or a `torch`: a process that starts there would import it instead of the real
    one, and fail in a way that no message explains."""
    brought = {path.stem: path.name for path in directory.glob("*.py")}
    brought |= {path.parent.name: f"{path.parent.name}/{path.name}" for path in directory.glob("*/__init__.py")}
    doubtful = brought.keys() & (sys.stdlib_module_names | _PACKAGES)
    if not doubtful:
        return
    # Imported while the folder is not in sys.path. The trainer never imports `wave`, so a `wave.py` does no harm.
    for module in needed:
        importlib.import_module(module)
    if hiding := sorted(brought[name] for name in doubtful & sys.modules.keys()):
        what = f"the trainer would import {', '.join(hiding)} instead of the installed module of the same name"
        raise UserCodeError(message.format(what))


def _enter(places: Sequence[Path], environ: MutableMapping[str, str]) -> None:
    before, inherited = os.getcwd(), [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.chdir(places[0])
    first = [str(place) for place in places]
    # `python -m` put the image's working directory first.
    sys.path[:] = [*first, *(part for part in sys.path if part not in ("", before) or part in inherited)]
    environ["PYTHONPATH"] = os.pathsep.join([*first, *inherited])


def run_command(command: Sequence[str]) -> NoReturn:
    """Replaces this process by the user's own loop, in the folder of its code."""
    environment = read_environment(os.environ)
    spec = read_run_spec(environment.run_spec, own_loop=True)
    if spec.code is not None:
        install(spec.code, environment, os.environ)
    sys.stdout.flush()
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - the command of the pod
    except OSError as error:
        raise UserCodeError(f"trainer.command: {command[0]} cannot be started: {error.strerror}") from None


def main(command: Sequence[str]) -> int:
    """Replaces this process by `command`; if it cannot, writes a termination message and returns the exit code."""
    try:
        run_command(command)
    except Exception as error:
        outcome = outcome_of(error)
    print(f"{outcome.code.name}: {outcome.message}", file=sys.stderr, flush=True)
    write_last_words(outcome, first=True)
    return outcome.code
