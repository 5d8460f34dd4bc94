"""Handwritten digits with a training loop of its own, for `trainer.command`: plain PyTorch under torchrun.

The calls of `run` are all that is special to a job. Without one they do nothing: `python -m examples.own_loop`
trains on a laptop. Copy it, and replace what is between them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from examples.digits import split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tpu_trainer.callbacks import session

LAPTOP = {"seed": 0, "trainSteps": 300, "batch": {"global": 64}, "optimizer": {"learningRate": 0.1}}


def main() -> None:
    """Trains for the recipe's steps with the recipe's numbers for this slice."""
    file = os.environ.get("TPUJOB_RUN_SPEC")
    recipe = json.loads(Path(file).read_text(encoding="utf-8")) if file else LAPTOP
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    (images, labels), (held_out, answers) = (data.tensors for data in split())
    torch.manual_seed(recipe["seed"])
    net: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=float(recipe["optimizer"]["learningRate"]), momentum=0.9)
    done = resume(net, optimizer)
    with session() as run:
        if done:
            run.checkpoint(done)
        for step in range(done + 1, recipe["trainSteps"] + 1):
            # The same draw on all processes, of which each takes its part.
            draw = torch.Generator().manual_seed(recipe["seed"] + step)
            rows = torch.randint(len(images), (recipe["batch"]["global"],), generator=draw)[rank::world]
            loss = cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(step, loss)
            if run.should_stop or step % 100 == 0 or step == recipe["trainSteps"]:
                with run.evaluating(), torch.no_grad():
                    accuracy = (net(held_out).argmax(dim=1) == answers).float().mean()
                run.evaluated(step, {"accuracy": accuracy})
                with run.saving():
                    save(net, optimizer, step, rank)
                run.checkpoint(step)
                if rank == 0:
                    print(f"step {step}: loss {loss.item():.4f}, accuracy {accuracy.item():.3f}", flush=True)
            if run.should_stop:
                break


def checkpoint_file() -> Path | None:
    """In this job's own folder below checkpoint.uri; None if the job names no place, or outside of a job."""
    folder = os.environ.get("TPUJOB_CHECKPOINT_URI")
    return Path(folder) / "last.pt" if folder else None


def resume(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last checkpoint, if there is one; returns the number of steps in it."""
    file = checkpoint_file()
    if file is None or not file.exists():
        return 0
    state = torch.load(file)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """By the first process. Renamed into place, so that a kill leaves the previous checkpoint whole."""
    file = checkpoint_file()
    if file is None or rank:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    unfinished.replace(file)


if __name__ == "__main__":
    main()
