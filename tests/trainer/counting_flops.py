"""Prints what torch_xla traces and compiles for three steps, without and with the operations being counted."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch.nn.functional import scaled_dot_product_attention

from tpu_trainer.reporting.throughput import FlopCounter


def graphs(counting: bool) -> str:
    """The hash of each step's graph, and how many compilations the steps took."""
    met.clear_all()
    torch.manual_seed(0)
    torch_xla.manual_seed(0)
    device = torch_xla.device()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Dropout(0.1),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.ones(16, 1, 8, 8).to(device)
    torch_xla.sync()
    hashes = []
    for step in range(3):
        with FlopCounter() if counting and step == 0 else nullcontext():
            heads = model(images).reshape(4, 4, 4, 8)
            loss = torch.einsum("bhqd,bhqe->bde", heads, scaled_dot_product_attention(heads, heads, heads)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(torch_xla._XLAC._get_graph_hash([loss, *model.parameters()]).hex())
        torch_xla.sync()
    return " ".join(["graphs", *hashes])


if __name__ == "__main__":
    print(graphs(counting=False))
    uncounted = met.metric_data("CompileTime")[0]
    print(graphs(counting=True))
    # The same programs: the second run finds all of them in the cache of the first.
    compiled_again = met.metric_data("CompileTime")
    assert not compiled_again or compiled_again[0] == 0, (uncounted, compiled_again)
