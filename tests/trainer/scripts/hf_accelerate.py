"""Accelerate's loop without a Trainer: prepare, accumulate, clip, gather the metrics."""

import os

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tpu_trainer.callbacks import session


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    features = torch.randn(512, 8)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step, right, seen = 0, 0, 0
    with session(global_batch_size=32 * accelerator.num_processes) as run:
        for _ in range(2):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    logits = model(inputs)
                    loss = cross_entropy(logits, labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                predicted, truth = accelerator.gather_for_metrics((logits.argmax(1), labels))
                right, seen = right + (predicted == truth).sum().item(), seen + len(truth)
                if accelerator.sync_gradients:
                    step += 1
                    run.step(step, loss, learning_rate=scheduler.get_last_lr()[0])
        run.evaluated(step, {"accuracy": right / seen})
    accelerator.print("processes", accelerator.num_processes, flush=True)
    # Not end_training: torch 2.9 ends gloo's threads with the GIL held, and hangs if one of them needs it.
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    assert os.environ.get("WORLD_SIZE")
    main()
