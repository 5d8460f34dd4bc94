"""torch_xla's own way to train: a device loader, `optimizer_step`, a loss that is read now and then."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tpu_trainer.callbacks import session


def main():
    device = torch_xla.device()
    torch.manual_seed(0)
    images = torch.randn(256, 1, 12, 12)
    data = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    step = 0
    with session() as run:
        for _ in range(3):
            for inputs, labels in pl.MpDeviceLoader(DataLoader(data, batch_size=32, shuffle=True), device):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                xm.optimizer_step(optimizer)
                step += 1
                run.step(step, loss)


if __name__ == "__main__":
    main()
