"""Prints how many devices torch_xla joins to one program before and after all of them are in one."""

import torch
import torch_xla
import torch_xla.runtime

from tpu_trainer.callbacks.stop import count_xla_devices

if __name__ == "__main__":
    idle = count_xla_devices()
    torch_xla.runtime.use_spmd()
    torch.ones(4, device=torch_xla.device()).sum().item()
    print(idle, count_xla_devices())
