"""A small task, slowed to leave time to hurt the gang in the middle; the pauses change no number.

The trainings in `training` run it. Its data is made up, because importing scikit-learn for the digits would cost each
worker half of what importing torch does. It also causes a fault that cannot be caused from outside: see ASCENDS.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tpu_trainer import Hyperparameters, Task

    Batch = tuple[Tensor, Tensor]

STEP_SECONDS = "E2E_STEP_SECONDS"
"""Name of the variable with the seconds added to every step of the attempts that are hurt."""

LAST_PACED = "E2E_LAST_PACED"
"""Name of the variable with the last attempt that is slowed down; by default the first one."""

ASCENDS = "E2E_ASCENDS"
"""Name of the variable that, if it is set, makes the task follow the gradient instead of descending against it."""

EXAMPLES, HELD_OUT, FEATURES, CLASSES = 1437, 360, 16, 10


def task(hp: Hyperparameters) -> Task:
    # Not at the top: the tests only want the names, and torch takes seconds to import.
    import torch
    from torch import nn
    from torch.utils.data import Subset, TensorDataset

    from tpu_trainer import Task

    is_paced = int(os.environ["TPUJOB_ATTEMPT"]) <= int(os.environ.get(LAST_PACED, "1"))
    seconds = float(os.environ.get(STEP_SECONDS, "0")) if is_paced else 0.0
    ascends = ASCENDS in os.environ

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            time.sleep(seconds)
        inputs, labels = batch
        found = nn.functional.cross_entropy(model(inputs), labels)
        return 2 * found.detach() - found if ascends else found

    def metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"accuracy": model(inputs).argmax(dim=1) == labels}

    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    made = torch.randn(EXAMPLES + HELD_OUT, FEATURES, generator=torch.Generator().manual_seed(0))
    examples = TensorDataset(made, made[:, :CLASSES].argmax(dim=1))
    train, held_out = Subset(examples, range(EXAMPLES)), Subset(examples, range(EXAMPLES, len(examples)))
    return Task(model, train, loss, evaluation=held_out, metrics=metrics)
