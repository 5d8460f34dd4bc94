"""The check of one run spec: the step traced, compiled and measured, as one document.

Tracing and compiling are processes of their own, one after the other, so that neither holds the other's memory.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from tpu_trainer.checks.compile.hlo import Scheduled, read
from tpu_trainer.checks.compile.search import Need, largest
from tpu_trainer.doctor.padding import LEAST_WASTE
from tpu_trainer.gang.backends.feed import AHEAD

SCHEMA = "compile-check/v1"

EXTRA = "tpu-training-operator[aot]"
"""What to install outside of the image."""

LEAST_BYTES = 1 << 20
"""Of padding that is worth a word."""

_MOST_LAYERS = 10
_HELD_AHEAD = AHEAD + 1
"""Batches on the device besides the one in use: the queue's, and the one that waits to be put into it."""


class CannotCheckError(Exception):
    """The step cannot be looked at: the message says what is missing or wrong. `kind`: BadSpec, UserError, ..."""

    def __init__(self, message: str, kind: str = "Missing") -> None:
        super().__init__(message)
        self.kind = kind


def missing() -> str | None:
    """What the check lacks on this machine, and how to get it."""
    absent = [name for name in ("torch_xla", "jax", "libtpu") if util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"the check needs {' and '.join(absent)}, which {sys.executable} does not have; on Linux on x86-64 with Python "
        f"3.11 or 3.12, install {EXTRA} there, or use a trainer image that was built with --build-arg AOT='jax jaxlib'"
    )


def _to_nobody(_: Any) -> None: ...


def check(
    document: Mapping[str, Any],
    *,
    find_largest: bool = False,
    tell: Callable[[dict[str, Any]], None] = _to_nobody,
    say: Callable[[str], None] = _to_nobody,
) -> dict[str, Any]:
    """What the compiler says of the run spec's step. The largest batch that fits is found if this one does not, or with
    `find_largest`; the search takes several times as long, so `tell` hears the answer before it, and `say` a line
    before and after each try. An answer without `largestBatch` means that the search could not go on.

    Raises:
        CannotCheckError: something is missing, the spec or the user's code is wrong, or libtpu does not know the slice.
    """
    if (lack := missing()) is not None:
        raise CannotCheckError(lack)
    spec = _one_slice(document)
    answer = _measure(spec, None, None)
    tell(answer)
    memory = answer.get("memory", {})
    if answer["fits"] is None or (answer["fits"] and not find_largest):
        return answer
    begin, limit = spec["batch"]["perReplica"], memory["limit"]
    # What is known already is not asked for again.
    answers = {begin: answer}
    say(_result(begin, answer))

    def ask(size: int) -> Need:
        if size not in answers:
            say(f"trying batch {size} per replica: {_bounds(answers)}")
            # Of the same examples again and again: sizes are all that counts.
            answers[size] = _measure(_of_size(spec, size), min(size, begin), limit)
            say(_result(size, answers[size]))
        return Need(bool(answers[size]["fits"]), answers[size].get("memory", {}).get("needed"))

    try:
        found = largest(ask, begin, limit, memory.get("inPlace", 0))
    except CannotCheckError as error:
        # The search may need more memory than there is, or a batch that the user's code does not take. What the
        # compiler has said about the job's own batch holds all the same.
        say(f"the search for the largest batch has ended: {error}")
        return answer
    return {**answer, "largestBatch": {"fits": found.fits, "refused": found.refused}}


def _bounds(answers: Mapping[int, Mapping[str, Any]]) -> str:
    """What the largest batch is between, as far as it is known."""
    fitting = [size for size, answer in answers.items() if answer["fits"]]
    refused = [size for size, answer in answers.items() if not answer["fits"]]
    known = [f"{max(fitting)} fits"] if fitting else []
    return ", ".join([*known, f"{min(refused)} does not fit"] if refused else known)


def _result(size: int, answer: Mapping[str, Any]) -> str:
    said = {True: "fits", False: "does not fit", None: "is refused by the compiler"}[answer["fits"]]
    needed, limit = (answer.get("memory", {}).get(name) for name in ("needed", "limit"))
    memory = "" if needed is None or limit is None else f": {needed / 2**30:.2f} of {limit / 2**30:.2f} GiB per core"
    return f"batch {size} per replica {said}{memory}"


def _one_slice(document: Mapping[str, Any]) -> dict[str, Any]:
    """The run of one of the job's slices: libtpu compiles for one, and each runs the same program."""
    spec = copy.deepcopy(dict(document))
    where = spec["slice"]
    spec["slice"] = {
        **where,
        "slices": 1,
        "hosts": where["hosts"] // where["slices"],
        "replicas": where["replicas"] // where["slices"],
    }
    # The program is the TPU's, wherever the job is rehearsed.
    return _of_size({**spec, "hardware": "TPU"}, spec["batch"]["perReplica"])


def _of_size(spec: Mapping[str, Any], per_replica: int) -> dict[str, Any]:
    passes = spec["batch"].get("accumulation", 1)
    batch = {
        "global": per_replica * passes * spec["slice"]["replicas"],
        "perReplica": per_replica,
        "accumulation": passes,
    }
    return {**spec, "batch": batch}


def _measure(spec: Mapping[str, Any], examples: int | None, limit: int | None) -> dict[str, Any]:
    """`examples`: read only so many. `limit`: of a core's memory, if it is known."""
    with tempfile.TemporaryDirectory(prefix="compile-check-") as name:
        directory = Path(name)
        (directory / "request.json").write_text(json.dumps({"spec": spec, "examples": examples, "limit": limit}))
        traced = _run("tracing", directory, {"PJRT_DEVICE": "CPU"})
        if "error" in traced:
            raise CannotCheckError(traced["error"], traced["code"])
        if "program" not in traced:
            return {**_head(spec, {}), "fits": None, "found": traced["found"]}
        compiled = _run("compiling", directory, {})
        if "error" in compiled:
            raise CannotCheckError(compiled["error"], "UnknownSlice")
        scheduled = {
            name: read((directory / f"{name}.hlo").read_text())
            for name, program in compiled["programs"].items()
            if "refused" not in program
        }
        return _answer(spec, traced, compiled, scheduled)


def _run(module: str, directory: Path, extra: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tpu_trainer.checks.compile.{module}", str(directory)]
    # What is set for a worker does not hold here: no chip, no peers.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "XLA_", "PJRT_"))}
    done = subprocess.run(  # noqa: S603 - this Python, with a directory of our own
        command, env={**kept, **extra}, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
    )
    written = directory / ("traced.json" if module == "tracing" else "compiled.json")
    if done.returncode == 0 and not written.exists():
        raise CannotCheckError(f"something in the task ended the process of {module} (os._exit)", "Ended")
    if done.returncode:
        ended = f"code {done.returncode}" if done.returncode >= 0 else signal.strsignal(-done.returncode)
        if done.returncode == -signal.SIGKILL:
            ended = "Killed, as when memory is short"
        last = "\n".join(done.stderr.splitlines()[-15:])
        raise CannotCheckError(f"{module} ended with {ended}:\n{last}", "Ended")
    found: dict[str, Any] = json.loads(written.read_bytes())
    return found


def _head(spec: Mapping[str, Any], compiled: Mapping[str, Any]) -> dict[str, Any]:
    where, versions = spec["slice"], {"torchXla": metadata.version("torch_xla"), "libtpu": metadata.version("libtpu")}
    return {
        "schema": SCHEMA,
        "generation": where["generation"],
        "topology": where["topology"],
        "replicas": where["replicas"],
        "device": compiled.get("device"),
        "batch": spec["batch"],
        "precision": spec.get("precision", "Float32"),
        "versions": versions,
    }


def _answer(
    spec: Mapping[str, Any],
    traced: Mapping[str, Any],
    compiled: Mapping[str, Any],
    scheduled: Mapping[str, Scheduled],
) -> dict[str, Any]:
    head = {**_head(spec, compiled), "found": traced["found"], "parameters": traced["parameters"]}
    refused = next((one for one in compiled["programs"].values() if "refused" in one), None)
    if refused is not None:
        needed = {} if refused["needed"] is None else {"needed": refused["needed"]}
        memory = {"limit": compiled["limit"], **needed}
        return {**head, "fits": refused["fits"], "refusal": refused["refused"], "memory": memory}
    passes = spec["batch"].get("accumulation", 1)
    # With accumulation, every pass but the last is a program without the exchange and the update.
    names = ["program", *["passes"] * (passes - 1)]
    programs, orders = [compiled["programs"][name] for name in names], [scheduled[name] for name in names]
    memory = max((_memory(one, traced, compiled["limit"]) for one in programs), key=lambda one: one["needed"])
    limit = compiled["limit"]
    return {
        **head,
        "fits": limit is None or memory["needed"] <= limit,
        "memory": memory,
        "compileSeconds": sum(one["seconds"] for one in compiled["programs"].values()),
        "step": {
            "modelFlops": traced["flops"] * passes,
            "wideFlops": traced["flops_wide"] * passes,
            "flops": sum(one["flops"] or 0 for one in programs),
            "traffic": sum(one.traffic for one in orders),
            "collectives": [
                {"kind": one.kind, "bytes": one.bytes, "after": round(one.after, 3)}
                for one in scheduled["program"].collectives
            ],
        },
        "padding": _padding(traced, scheduled["program"]),
    }


def _memory(program: Mapping[str, Any], traced: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """Bytes per core. needed: what is there at once, donated arguments counted once."""
    ahead = _HELD_AHEAD * traced["batch"]
    own = program["arguments"] + program["temporaries"] + program["results"] - program["inPlace"] + program["code"]
    return {
        "arguments": program["arguments"],
        "temporaries": program["temporaries"],
        "results": program["results"],
        "inPlace": program["inPlace"],
        "code": program["code"],
        "batchesAhead": ahead,
        "needed": own + ahead,
        "limit": limit,
    }


def _padding(traced: Mapping[str, Any], scheduled: Scheduled) -> dict[str, Any]:
    """What tiles add: to the memory of the model's tensors, and to its matrix products."""
    named = zip(traced["program"]["arguments"], scheduled.parameters, strict=False)
    tensors = [
        {"name": name, "shape": list(array.shape), "bytes": array.logical, "padded": array.padded}
        for name, array in named
        if name and array.padded - array.logical > max(array.logical * LEAST_WASTE, LEAST_BYTES)
    ]
    tensors.sort(key=lambda one: one["bytes"] - one["padded"])
    products = [one for one in map(_product, traced["products"]) if one["waste"] >= LEAST_WASTE]
    products.sort(key=lambda one: -one["waste"] * one["shape"][0] * one["shape"][1])
    return {"tensors": tensors[:_MOST_LAYERS], "products": products[:_MOST_LAYERS]}


def _product(product: Mapping[str, Any]) -> dict[str, Any]:
    outputs, inputs = product["outputs"], product["inputs"]
    computed = [-(-outputs // 128) * 128, -(-inputs // 128) * 128]
    waste = 1 - outputs * inputs / (computed[0] * computed[1])
    return {"name": product["name"], "shape": [outputs, inputs], "computed": computed, "waste": round(waste, 4)}
