"""Traces, compiles and measures the step of one run spec, and returns one document.

Tracing has a process to itself, because torch_xla and libtpu each bring an XLA, and because it runs the user's code.
This process compiles.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata, util
from typing import Any

from tpu_trainer.checks.compile import compiling
from tpu_trainer.checks.compile.cache import AnswerCache
from tpu_trainer.checks.compile.hlo import Scheduled, read
from tpu_trainer.checks.compile.search import Need, largest

SCHEMA = "compile-check/v1"

EXTRA = "tpu-training-operator[aot]"
"""The package to install outside of the image."""

# Padding from which a tensor is mentioned: bytes, and the share of its size.
_LEAST_BYTES, _LEAST_WASTE = 1 << 20, 0.1
_MOST_LAYERS = 10


class CannotCheckError(Exception):
    """The step cannot be checked: the message says what is missing or wrong. `kind`: BadSpec, UserError, ..."""

    def __init__(self, message: str, kind: str = "Missing") -> None:
        super().__init__(message)
        self.kind = kind


def missing() -> str | None:
    """Says what the check lacks on this machine, and how to get it; None if nothing is missing."""
    absent = [name for name in ("torch_xla", "jax", "libtpu") if util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"the check needs {' and '.join(absent)}, which {sys.executable} does not have; on Linux on x86-64 with Python "
        f"3.11 or 3.12, install {EXTRA} there, or use a trainer image that was built with --build-arg AOT='jax jaxlib'"
    )


def _ignore(_: Any) -> None: ...


def check(
    document: Mapping[str, Any],
    *,
    find_largest: bool = False,
    cache: AnswerCache | None = None,
    tell: Callable[[dict[str, Any]], None] = _ignore,
    say: Callable[[str], None] = _ignore,
) -> dict[str, Any]:
    """Returns what the compiler says about the run spec's step.

    If the batch does not fit, or with `find_largest`, it searches for the largest batch that does. The search takes
    several times as long, so `tell` gets the answer before it, and `say` a line before and after each try. An answer
    without `largestBatch` means that the search could not go on.

    Raises:
        CannotCheckError: something is missing, the spec or the user's code is wrong, or libtpu does not know the slice.
    """
    if (reason := missing()) is not None:
        raise CannotCheckError(reason)
    spec = _one_slice(document)
    cache = cache or AnswerCache()
    answer = _measure(spec, None, cache)
    tell(answer)
    memory = answer.get("memory", {})
    if answer["fits"] is None or (answer["fits"] and not find_largest):
        return answer
    begin, limit = spec["batch"]["perReplica"], memory["limit"]
    # Each size is compiled once.
    answers = {begin: answer}
    say(_result(begin, answer))

    def ask(size: int) -> Need:
        if size not in answers:
            say(f"trying batch {size} per replica: {_bounds(answers)}")
            # The same examples again and again: only their sizes count.
            answers[size] = _measure(_of_size(spec, size), min(size, begin), cache)
            say(_result(size, answers[size]))
        return Need(bool(answers[size]["fits"]), answers[size].get("memory", {}).get("needed"))

    try:
        bounds = largest(ask, begin, limit, memory.get("inPlace", 0))
    except CannotCheckError as error:
        # The search may need more memory than there is, or a batch that the user's code does not take. The answer
        # about the job's own batch still holds.
        say(f"the search for the largest batch has ended: {error}")
        return answer
    return {**answer, "largestBatch": {"fits": bounds.fits, "refused": bounds.refused}}


def _bounds(answers: Mapping[int, Mapping[str, Any]]) -> str:
    """Says between which sizes the largest batch lies, as far as it is known."""
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
    """Returns the run on one of the job's slices. libtpu compiles for one slice, and several run a program of backend
    XLASPMD, which is not traced: a replica of backend XLA stands for one of theirs."""
    spec = copy.deepcopy(dict(document))
    where = spec["slice"]
    spec["slice"] = {
        **where,
        "slices": 1,
        "hosts": where["hosts"] // where["slices"],
        "replicas": where["replicas"] // where["slices"],
    }
    # The program is the TPU's, wherever the job is rehearsed.
    spec["backend"] = "xla" if where["slices"] > 1 else spec["backend"]
    return _of_size({**spec, "hardware": "TPU"}, spec["batch"]["perReplica"])


def _of_size(spec: Mapping[str, Any], per_replica: int) -> dict[str, Any]:
    passes = spec["batch"].get("accumulation", 1)
    batch = {
        "global": per_replica * passes * spec["slice"]["replicas"],
        "perReplica": per_replica,
        "accumulation": passes,
    }
    return {**spec, "batch": batch}


def _measure(spec: Mapping[str, Any], examples: int | None, cache: AnswerCache) -> dict[str, Any]:
    """Traces and compiles the step. `examples`: the most to read."""
    traced = _trace({"spec": spec, "examples": examples, "parent": os.getpid()})
    if "error" in traced:
        raise CannotCheckError(traced["error"], traced["code"])
    if "program" not in traced:
        return {**_head(spec), "fits": None, "found": traced["found"]}
    try:
        compiled = compiling.compile_step(traced, spec["slice"], cache)
    except compiling.UnknownSliceError as error:
        raise CannotCheckError(str(error), "UnknownSlice") from None
    return _answer(spec, traced, compiled)


def _trace(request: Mapping[str, Any]) -> dict[str, Any]:
    # A worker's variables do not hold here, where there are neither chips nor peers; torch_xla's own settings do.
    elsewhere = ("TPU_", "PJRT_", "XLA_FLAGS", "XLA_USE_SPMD", "XLA_AUTO_SPMD")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(elsewhere)}
    done = subprocess.run(
        [sys.executable, "-m", "tpu_trainer.checks.compile.tracing"],
        input=json.dumps(request),
        # jax would look for a TPU.
        env={**environ, "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGSEGV and not request.get("recordsAll"):
        # Something was read off the device that the first step does not read.
        return _trace({**request, "recordsAll": True})
    if done.returncode == 0 and not done.stdout:
        raise CannotCheckError("something in the task ended the process that traces it (os._exit)", "Ended")
    if done.returncode:
        ended = f"code {done.returncode}" if done.returncode >= 0 else signal.strsignal(-done.returncode)
        if done.returncode == -signal.SIGKILL:
            ended = "Killed, as when memory is short"
        last = "\n".join(done.stderr.splitlines()[-15:])
        raise CannotCheckError(f"tracing ended with {ended}:\n{last}", "Ended")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _head(spec: Mapping[str, Any]) -> dict[str, Any]:
    where, versions = spec["slice"], {"torchXla": metadata.version("torch_xla"), "libtpu": metadata.version("libtpu")}
    return {
        "schema": SCHEMA,
        "generation": where["generation"],
        "topology": where["topology"],
        "replicas": where["replicas"],
        "batch": spec["batch"],
        "precision": spec.get("precision", "Float32"),
        "versions": versions,
    }


def _answer(spec: Mapping[str, Any], traced: Mapping[str, Any], compiled: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: traced[name] for name in ("found", "parameters", "flags", "digest")}
    head = {**_head(spec), "device": compiled["device"], **known}
    refused = next((program for program in compiled["programs"].values() if "refused" in program), None)
    if refused is not None:
        needed = {} if refused["needed"] is None else {"needed": refused["needed"]}
        memory = {"limit": compiled["limit"], **needed}
        return {**head, "fits": refused["fits"], "refusal": refused["refused"], "memory": memory}
    passes = spec["batch"].get("accumulation", 1)
    # With accumulation, every pass but the last is a program without the exchange and the update.
    names = ["program", *["passes"] * (passes - 1)]
    scheduled = {name: read(program["hlo"]) for name, program in compiled["programs"].items()}
    programs, orders = [compiled["programs"][name] for name in names], [scheduled[name] for name in names]
    exchanged, waited = Counter[str](), Counter[str]()
    for collective in scheduled["program"].collectives:
        exchanged[collective.kind] += collective.bytes
        if collective.waits:
            waited[collective.kind] += collective.bytes
    usage = [_memory(program, traced["ahead"], compiled["limit"]) for program in programs]
    memory = max(usage, key=lambda part: int(part["needed"]))
    limit = compiled["limit"]
    return {
        **head,
        "fits": limit is None or memory["needed"] <= limit,
        "memory": memory,
        "kept": all(program.get("kept", False) for program in compiled["programs"].values()),
        "compileSeconds": sum(program["seconds"] for program in compiled["programs"].values()),
        "step": {
            "modelFlops": traced["flops"] * passes,
            "wideFlops": traced["flops_wide"] * passes,
            "flops": sum(max(0, program["flops"] or 0) for program in programs),
            "traffic": sum(order.traffic for order in orders),
            "exchanged": dict(exchanged),
            "waited": dict(waited),
            "waitedTraffic": sum(collective.traffic for collective in scheduled["program"].collectives),
            "collectives": [
                {**asdict(collective), "after": round(collective.after, 3)}
                for collective in scheduled["program"].collectives
            ],
        },
        "padding": _padding(traced, scheduled["program"]),
    }


def _memory(program: Mapping[str, Any], ahead: int, limit: int | None) -> dict[str, Any]:
    """Returns bytes per core; `needed` is what is there at once, with donated arguments counted once."""
    parts = {name: program[name] for name in ("arguments", "temporaries", "results", "inPlace", "code")}
    needed = sum(parts.values()) - 2 * parts["inPlace"] + ahead
    return {**parts, "batchesAhead": ahead, "needed": needed, "limit": limit}


def _padding(traced: Mapping[str, Any], scheduled: Scheduled) -> dict[str, Any]:
    """Returns what padding to whole tiles adds to the memory of the model's tensors, and to its matrix products."""
    named = zip(traced["program"]["arguments"], scheduled.parameters, strict=False)
    tensors = [
        {"name": name, "shape": list(array.shape), "bytes": array.logical, "padded": array.padded}
        for name, array in named
        if name and array.padded - array.logical > max(array.logical * _LEAST_WASTE, _LEAST_BYTES)
    ]
    tensors.sort(key=lambda tensor: tensor["bytes"] - tensor["padded"])
    return {"tensors": tensors[:_MOST_LAYERS], "products": traced["products"][:_MOST_LAYERS]}
