"""Warnings about torchrun options that keep the hosts of a user's own loop apart.

torchrun takes each option from its variable (`PET_*`, which the operator sets) unless the command line gives it, and
command lines are often copied from a single machine with GPUs.
"""

from collections.abc import Iterator, Sequence

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.trainer import BackendName, TorchRuntime

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = ("standalone", "no_python", "run_path", "use_env")
_THIS_HOST = ("localhost", "127.0.0.1")
_PROCESSES = "PET_NPROC_PER_NODE"


def torchrun_warnings(spec: Spec, hosts: int) -> Iterator[str]:
    trainer = spec.trainer
    options = _options([*(trainer.command or ()), *(trainer.args or ())])
    if options is None or trainer.backend is not BackendName.TORCH:
        return
    if hosts > 1:
        yield from _host_warnings(options, hosts)
    per_host = (trainer.torch or TorchRuntime()).processes_per_host
    processes = options.get("nproc_per_node", str(per_host))
    if processes != str(per_host) and all(variable.name != _PROCESSES for variable in trainer.env or ()):
        yield (
            f"torchrun's --nproc-per-node {processes} overrides trainer.torch.processesPerHost {per_host}, which"
            " TPUJOB_PER_PROCESS_BATCH_SIZE follows: leave it out and set the field"
        )


def _host_warnings(options: dict[str, str], hosts: int) -> Iterator[str]:
    nodes = options.get("nnodes", str(hosts))
    if nodes == "1":
        yield f"each of the {hosts} hosts trains its own model: leave torchrun's --nnodes 1 out, the job sets it"
    elif nodes.isdecimal() and nodes != str(hosts):
        yield f"torchrun's --nnodes {nodes} does not fit the {hosts} hosts of the job, which would wait for each other"
    elif "standalone" in options:
        yield _waiting_text("--standalone", hosts)
    else:
        for name in ("master_addr", "rdzv_endpoint"):
            if options.get(name, "").partition(":")[0] in _THIS_HOST:
                yield _waiting_text(f"--{name.replace('_', '-')} {options[name]}", hosts)


def _waiting_text(option: str, hosts: int) -> str:
    return f"torchrun's {option} makes each of the {hosts} hosts wait for the others forever: leave it out"


def _options(words: Sequence[str]) -> dict[str, str] | None:
    """Returns torchrun's own options, with _ in their names; None if the command is another program."""
    names = [word.rpartition("/")[2] for word in words]
    start = next((place for place, name in enumerate(names) if name in ("torchrun", *_MODULES)), None)
    if start is None:
        return None
    options: dict[str, str] = {}
    rest = iter(words[start + 1 :])
    for word in rest:
        if not word.startswith("--"):
            break  # The script, or -m and its module.
        written, equals, value = word.removeprefix("--").partition("=")
        name = written.replace("-", "_")
        options[name] = value if equals or name in _FLAGS else next(rest, "")
    return options
