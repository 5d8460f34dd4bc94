"""Handwritten digits with a training loop of its own on the chips of a slice, for `trainer.command`.

`torch_xla.launch` starts a process for each chip. SIGTERM reaches the process that called it, and not those of the
chips: so it leaves a file for them, and every few steps they ask each other whether any of them sees it. Without a job
and without a TPU, `PJRT_DEVICE=CPU python -m examples.own_loop_tpu` trains on a laptop.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from examples.digits import split
from examples.own_loop import LAPTOP, checkpoint_file, resume
from torch import nn
from torch.nn.functional import cross_entropy

from tpu_trainer.callbacks import session

ASK_EVERY = 10
"""Steps between two questions: each one makes the chips wait for the hosts."""


def main() -> None:
    """Starts the processes of this host's chips, and passes on that the job is told to stop."""
    with TemporaryDirectory() as folder:
        told = Path(folder, "told-to-stop")
        signal.signal(signal.SIGTERM, lambda number, frame: told.touch())
        torch_xla.launch(train, args=(told,))


def train(ordinal: int, told: Path) -> None:
    """Trains on one chip, in its own process."""
    file = os.environ.get("TPUJOB_RUN_SPEC")
    recipe = json.loads(Path(file).read_text(encoding="utf-8")) if file else LAPTOP
    device, world = torch_xla.device(), xr.world_size()
    (images, labels), (held_out, answers) = (data.tensors for data in split())
    torch.manual_seed(recipe["seed"])  # the same weights on every chip
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=float(recipe["optimizer"]["learningRate"]), momentum=0.9)
    done = resume(net, optimizer)
    asks = 0

    def agree(here: bool) -> bool:
        nonlocal asks
        asks += 1
        return asks % ASK_EVERY == 0 and any(xm.mesh_reduce("stop", here or told.exists(), list))

    with session(agree=agree) as run:
        if done:
            run.checkpoint(done)
        for step in range(done + 1, recipe["trainSteps"] + 1):
            draw = torch.Generator().manual_seed(recipe["seed"] + step)
            rows = torch.randint(len(images), (recipe["batch"]["global"],), generator=draw)[ordinal::world]
            with torch_xla.step():
                loss = cross_entropy(net(images[rows].to(device)), labels[rows].to(device))
                optimizer.zero_grad()
                loss.backward()
                xm.optimizer_step(optimizer)  # averages the gradients over all chips
            run.step(step, loss)
            if run.should_stop or step % 100 == 0 or step == recipe["trainSteps"]:
                with run.evaluating(), torch.no_grad():
                    accuracy = (net(held_out.to(device)).argmax(dim=1).cpu() == answers).float().mean()
                run.evaluated(step, {"accuracy": accuracy})
                with run.saving():
                    save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, ordinal)
                run.checkpoint(step)
                if ordinal == 0:
                    print(f"step {step}: loss {loss.item():.4f}, accuracy {accuracy.item():.3f}", flush=True)
            if run.should_stop:
                break


def save(state: dict[str, object], ordinal: int) -> None:
    """Writes the state from chip 0 of the whole slice. Renamed into place, as in `own_loop`."""
    file = checkpoint_file()
    if file is None:
        return
    unfinished = file.with_suffix(".unfinished")
    if ordinal == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
    xm.save(state, str(unfinished), global_master=True)
    if ordinal == 0:
        unfinished.replace(file)


if __name__ == "__main__":
    main()
