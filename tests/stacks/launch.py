"""Runs on the second stack: how the trainer lets TorchTPU lay out a slice, for one host after the other.

Reads a list of hosts from its input and prints what each host's environment gained, after the topologies that TorchTPU
knows for a host: by generation, with the number of chips. TorchTPU looks at a variable once
in a process; here it looks again, so that a process can be one host after the other. Its search for chips on the PCI
bus is told what a host of the slice would have.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

from torch_tpu._internal import env_utils
from torch_tpu._internal.distributed import distributed
from torch_tpu._internal.utils import hardware

from tpu_trainer.contract.environment import WorkerEnvironment, read_environment
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.worker import host

ROWS = {
    "v4": hardware._V4_TOPOLOGY,
    "v5p": hardware._V5P_TOPOLOGY,
    "v5e": hardware._V5E_TOPOLOGY,
    "v6e": hardware._V6E_TOPOLOGY,
    "tpu7x": hardware._V7_TOPOLOGY,
}
"""Where TorchTPU finds the topology of a host by its number of chips."""


class Variables:
    """TorchTPU's own readers, without memory."""

    @staticmethod
    def get_str_env_once(name: str, default_value: str | None = None) -> str | None:
        return os.environ.get(name, default_value)

    @staticmethod
    def get_int_env_once(name: str, default_value: int) -> int:
        return int(os.environ.get(name, default_value))


def laid_out(asked: dict[str, Any]) -> dict[str, str]:
    """What the host's processes inherit besides the pod's own variables; "error": why there is no layout."""
    os.environ.clear()
    os.environ.update(asked["env"])
    environment: WorkerEnvironment = read_environment(os.environ)
    found = (asked["processes"], ROWS[asked["generation"]])
    with (
        mock.patch.object(hardware, "_scan_pci_tpus", return_value=found),
        mock.patch.object(distributed, "env", Variables),
        mock.patch.dict(env_utils._resolved_values, clear=True),
    ):
        try:
            host._lay_out_slice(environment, asked["processes"])
        except BadSpecError as error:
            return {"error": str(error)}
    return {name: value for name, value in os.environ.items() if asked["env"].get(name) != value}


if __name__ == "__main__":
    known = {name: list(rows.items()) for name, rows in ROWS.items()}
    json.dump([known, [laid_out(asked) for asked in json.load(sys.stdin)]], sys.stdout)
