"""`python -m tpu_trainer compile-check` runs the check for `tpujob compile-check`, and in a pod of the image.

Its exit codes: 0 the step fits, 1 it does not fit or cannot be one program, 2 it could not be checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_trainer.checks.compile.check import CannotCheckError, check
from tpu_trainer.contract.environment import read_environment
from tpu_trainer.contract.errors import TrainerError
from tpu_trainer.contract.protocol import ENV_RUN_SPEC
from tpu_trainer.contract.spec import parse_run_spec
from tpu_trainer.worker.code import install

FITS, DOES_NOT, CANNOT_SAY = range(3)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tpu_trainer compile-check", description=__doc__)
    parser.add_argument("--run-spec", type=Path, default=os.environ.get(ENV_RUN_SPEC), help=f"default: ${ENV_RUN_SPEC}")
    parser.add_argument("--largest", action="store_true", help="find the largest batch per replica that fits")
    parser.add_argument("--output", type=Path, help="where the answer goes, as JSON; default: stdout")
    options = parser.parse_args(arguments)
    if options.run_spec is None:
        parser.error(f"--run-spec is needed where {ENV_RUN_SPEC} is not set")
    answer, code = _run(options.run_spec, options.output, find_largest=options.largest)
    if options.output is None:
        print(json.dumps(answer, indent=1))
    else:
        _write(answer, options.output)
    return code


def _run(path: Path, output: Path | None, *, find_largest: bool) -> tuple[dict[str, Any], int]:
    def tell(answer: dict[str, Any]) -> None:
        # The caller may have to end the search before it is done.
        if output is not None:
            _write(answer, output)

    def say(line: str) -> None:
        # If the answer goes to stdout, nothing else does.
        print(line, file=sys.stderr if output is None else sys.stdout, flush=True)

    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise CannotCheckError(f"run spec {path}: not a JSON object", "BadSpec")
        if "code" in document:
            spec = parse_run_spec(document)
            assert spec.code is not None
            install(spec.code, read_environment({**os.environ, ENV_RUN_SPEC: str(path)}), os.environ)
        answer = check(document, find_largest=find_largest, tell=tell, say=say)
    except CannotCheckError as error:
        return _failed(str(error), error.kind)
    except TrainerError as error:
        return _failed(str(error), error.code.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _failed(f"run spec {path}: {error}", "BadSpec")
    return answer, FITS if answer["fits"] else DOES_NOT


def _failed(message: str, kind: str) -> tuple[dict[str, Any], int]:
    print(f"compile-check: {message}", file=sys.stderr)
    return {"error": message, "kind": kind}, CANNOT_SAY


def _write(answer: dict[str, Any], output: Path) -> None:
    unfinished = output.with_name(f"{output.name}.part")
    unfinished.write_text(json.dumps(answer, indent=1), encoding="utf-8")
    unfinished.replace(output)
