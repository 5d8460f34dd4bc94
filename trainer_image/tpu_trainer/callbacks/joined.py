"""Checks that the processes of the user's own loop train one model.

Nothing else notices if they do not: each of them learns, and the job succeeds with the model of one of them.
"""

from __future__ import annotations

import sys


def warn_of_separate_models(hosts: int) -> str | None:
    """Returns a warning if torch.distributed, which joins the hosts with backend Torch, has joined fewer processes."""
    joined = world_size()
    if joined >= hosts:
        return None
    return (
        f"torch.distributed joins {joined if joined > 1 else 'no'} processes, and the job has {hosts} hosts: each host"
        " trains its own model, unless the hosts exchange gradients in another way. Start the script with torchrun,"
        " without --standalone and --nnodes, and check that it calls init_process_group (docs/command.md)"
    )


def world_size() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())
