"""One run of another loop, in its own process: `python -m bench.trainer.contender LOOP MODEL STEPS`."""

from __future__ import annotations

import importlib
import os
import sys

import torch

from bench.trainer.models import MODELS, SEED

LOOPS = {
    "hand": "hand:best",
    "hand-naive": "hand:naive",
    "accelerate": "accelerated:train",
    "lightning-lean": "lightning:lean",
    "lightning-default": "lightning:default",
    "feed-plain": "feeds:plain",
    "feed-hand": "feeds:by_hand",
    "feed-ours": "feeds:ours",
}


def main(loop: str, name: str, steps: int) -> None:
    # Imported only if chosen: what one framework does to torch on import must not slow down another.
    module, _, function = LOOPS[loop].partition(":")
    train = getattr(importlib.import_module(f"bench.trainer.{module}"), function)
    model = MODELS[name]
    torch.manual_seed(SEED)
    train(model.task(), model.batch, steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    # Without the interpreter's own end, which the threads of torch_xla's loader now and then turn into an abort. All
    # that was said has been flushed.
    os._exit(0)
