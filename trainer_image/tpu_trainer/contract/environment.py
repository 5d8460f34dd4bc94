"""The environment variables of a worker process and its run spec, read once by `entry`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_contract import protocol
from tpu_contract.run_spec import RunSpec, RunSpecError, parse_run_spec
from tpu_trainer.contract.errors import BadSpecError


@dataclass(frozen=True)
class ProgressEndpoint:
    """Where progress is reported: to the operator that started the run, or to Kubeflow Trainer (`kubeflow`), which
    takes another payload. `token_file` is renewed during the run; `ca_file` holds the certificate to trust (PEM)."""

    url: str
    token_file: Path
    ca_file: Path
    kubeflow: bool = False


@dataclass(frozen=True)
class WorkerEnvironment:
    """This host's place in the gang and where its reports go.

    `host_index` counts over the whole job, all slices together. The rendezvous address matters with several hosts only.
    `report_directory`: where the report goes if the run spec does not say. `hang_seconds`: overrides the watchdog's own
    limit. `progress_service`: None if progress is not reported. `local_rank`: the process's index on its host, set by
    `host`; `host_process`: the pid of the host's first process, where that is another one. `code_directory`: where
    trainer.code is unpacked; `code_archive`: the archive, if it is mounted from a Secret. `packages_sha256`: of what
    its requirements.txt has added.
    """

    run_spec: Path
    host_index: int
    num_hosts: int
    master_addr: str
    master_port: int
    report_directory: Path | None = None
    hang_seconds: float | None = None
    progress_service: ProgressEndpoint | None = None
    local_rank: int = 0
    host_process: int | None = None
    code_directory: Path | None = None
    code_archive: Path | None = None
    packages_sha256: str | None = None


def read_environment(environ: Mapping[str, str]) -> WorkerEnvironment:
    """Reads the worker's environment.

    Raises:
        BadSpecError: a variable is missing or malformed; the text names it.
    """
    run_spec = environ.get(protocol.ENV_RUN_SPEC)
    if not run_spec:
        raise BadSpecError(f"{protocol.ENV_RUN_SPEC} is not set; it must be the path of the run spec")
    num_hosts = _integer(environ, protocol.ENV_NUM_HOSTS, default=1, minimum=1)
    hang = protocol.ENV_HANG_SECONDS
    alone = num_hosts == 1
    if not alone and not environ.get(protocol.ENV_MASTER_ADDR):
        raise BadSpecError(f"{protocol.ENV_MASTER_ADDR} is not set; with {num_hosts} hosts it must name host 0")
    return WorkerEnvironment(
        run_spec=Path(run_spec),
        host_index=_integer(environ, protocol.ENV_HOST_INDEX, default=0 if alone else None, minimum=0),
        num_hosts=num_hosts,
        master_addr=environ.get(protocol.ENV_MASTER_ADDR, ""),
        master_port=_integer(environ, protocol.ENV_MASTER_PORT, default=0 if alone else None, minimum=0),
        report_directory=Path(directory) if (directory := environ.get(protocol.ENV_REPORT_DIRECTORY)) else None,
        hang_seconds=_integer(environ, hang, default=None, minimum=1) if environ.get(hang) else None,
        progress_service=_progress_service(environ),
        code_directory=Path(code) if (code := environ.get(protocol.ENV_CODE_DIRECTORY)) else None,
        code_archive=Path(archive) if (archive := environ.get(protocol.ENV_CODE_ARCHIVE)) else None,
        packages_sha256=environ.get(protocol.ENV_PACKAGES_SHA256) or None,
    )


def check_agreement(environment: WorkerEnvironment, spec: RunSpec) -> None:
    """Raises BadSpecError if environment and run spec describe different gangs."""
    if environment.num_hosts != spec.slice.hosts:
        raise BadSpecError(
            f"{protocol.ENV_NUM_HOSTS} is {environment.num_hosts}, but the run spec's slice.hosts is {spec.slice.hosts}"
        )
    if environment.host_index >= environment.num_hosts:
        raise BadSpecError(
            f"{protocol.ENV_HOST_INDEX} is {environment.host_index}; with {environment.num_hosts} hosts it must be "
            f"0..{environment.num_hosts - 1}"
        )


def _progress_service(environ: Mapping[str, str]) -> ProgressEndpoint | None:
    """Returns the operator's service if it is set: its pods name both, since it accepts Kubeflow Trainer's payload,
    too."""
    operator = (protocol.ENV_PROGRESS_URL, protocol.ENV_PROGRESS_TOKEN_FILE, protocol.ENV_PROGRESS_CA_FILE)
    kubeflow = (protocol.ENV_KUBEFLOW_URL, protocol.ENV_KUBEFLOW_TOKEN, protocol.ENV_KUBEFLOW_CA)
    for names in (operator, kubeflow):
        url, token, ca = (environ.get(name) for name in names)
        if url and token and ca:
            return ProgressEndpoint(url, Path(token), Path(ca), kubeflow=names is kubeflow)
    return None


def _integer(environ: Mapping[str, str], name: str, default: int | None, minimum: int) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) < minimum:
        raise BadSpecError(f"{name}: expected an integer of at least {minimum}, got {text!r}")
    return int(text)


def read_run_spec(path: Path, *, own_loop: bool = False) -> RunSpec:
    """Reads and checks the run spec file. `own_loop`: the job has `trainer.command`, so it names no entrypoint.

    Raises:
        BadSpecError: the file is missing or not JSON, or a field is wrong; the text begins with the file's path.
    """
    try:
        return check_run_spec(json.loads(path.read_bytes()), own_loop=own_loop)
    except OSError as error:
        raise BadSpecError(f"run spec {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadSpecError(f"run spec {path}: not JSON: {error}") from error
    except BadSpecError as error:
        raise BadSpecError(f"run spec {path}: {error}") from error


def check_run_spec(document: object, *, own_loop: bool = False) -> RunSpec:
    """Reads a parsed run spec. Raises BadSpecError, whose text begins with the wrong field's path."""
    try:
        return parse_run_spec(document, own_loop=own_loop)
    except RunSpecError as error:
        raise BadSpecError(str(error)) from error
