"""Prints the HLO of one training step as a TPU host would compile it, without running it.

xm.all_reduce is the genuine one here: XLA's CPU device can be given its graph, only not execute it.
"""

from __future__ import annotations

import torch
import torch_xla

from tests.trainer import tasks
from tpu_trainer.gang.backends.base import move_model
from tpu_trainer.gang.backends.xla import XlaChip
from tpu_trainer.gang.exchange import Flags, Loss, exchange


def print_step(rank: int) -> None:
    chip = XlaChip(expected_replicas=2)
    model = tasks.Network()
    # Not chip.place, whose broadcast would be executed.
    move_model(model, chip.device)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    loss = tasks.loss(model, chip.to_device(tasks.examples()[:8]))
    loss.backward()
    requests = Flags(chip).requests(stop=False, save=False)
    sums = exchange(parameters, Loss(loss), requests, chip)
    optimizer.step()
    if rank == 0:
        print(torch_xla._XLAC._get_xla_tensors_hlo([*parameters, sums.signals]), flush=True)


if __name__ == "__main__":
    torch_xla.launch(print_step, start_method="fork")
