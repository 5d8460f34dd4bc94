"""torch_xla's SPMD mode: one process per host, one program over all devices, split up by XLA's partitioner.

The model is replicated and the batch is cut along its first dimension, so the partitioner itself puts the all-reduce
where a mean over the batch needs it: loss and gradients are those of the global batch already, and batch statistics
are the global batch's too. On hardware CPU the devices are virtual ones of one process; with several hosts (TPU) a
process sends the rows of its own host, and host memory meets over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

from tpu_trainer.backends.group import Group
from tpu_trainer.backends.xla_hosts import XlaHosts
from tpu_trainer.errors import BadSpecError, UserCodeError


def start_spmd(virtual_devices: int | None) -> None:
    """Before torch_xla starts its client, which reads both settings once. `virtual_devices`: on hardware CPU."""
    if virtual_devices is not None:
        os.environ["CPU_NUM_DEVICES"] = str(virtual_devices)
    xr.use_spmd()


class XlaSpmd(XlaHosts):
    """One process of the program. `group` joins the hosts; each holds an equal part of the batch and of the devices."""

    reads_free = False
    terms = 1
    one_program = True

    def __init__(self, group: Group, expected_replicas: int) -> None:
        super().__init__(group)
        # One program draws the numbers of the whole batch, and a device takes its part.
        self.drawing_rank = 0
        devices = xr.global_runtime_device_count()
        if devices != expected_replicas:
            raise BadSpecError(
                f"slice.replicas: the run spec says {expected_replicas} replicas, PJRT sees {devices} devices: "
                "accelerator type and topology of the job do not match the slice that the pods run on"
            )
        self._local_devices = devices // group.size
        self._mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))

    def send(self, tensor: Tensor) -> Tensor:
        """Rows are shared out to the devices; a tensor that has none, or too few, is on all of them.

        Raises:
            UserCodeError: with several hosts, rows that cannot be shared out: each host has other ones.
        """
        rows = tensor.shape[0] if tensor.dim() else 0
        shared = rows > 0 and rows % self._local_devices == 0
        if rows and not shared and self.world > 1:
            raise UserCodeError(
                f"a batch has a tensor of shape {list(tensor.shape)}; with backend xla-spmd on {self.world} hosts "
                f"its first dimension must be a multiple of the host's {self._local_devices} devices"
            )
        split = ("data" if shared else None, *[None] * (tensor.dim() - 1)) if tensor.dim() else ()
        sharding = xs.ShardingSpec(self._mesh, split, minibatch=shared) if split else None
        (sent,) = xm.send_cpu_data_to_device([tensor], self.device, sharding)
        result: Tensor = sent
        return result

    def flag(self, up: bool) -> Tensor:
        """One element per device, so that each host brings its own and their sum is the same everywhere."""
        return self.send(torch.full([self._local_devices], float(up)))

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        """What comes in is over the global batch already."""
        return list(gradients), signals
