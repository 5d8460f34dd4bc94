"""What is compared: names in the JSON, and their descriptions."""

from __future__ import annotations

OURS = "tpu-trainer"
LOOPS = {
    OURS: "this trainer",
    "hand": "torch_xla by hand, the best way known",
    "hand-naive": "torch_xla by hand, the usual way",
    "accelerate": "Accelerate",
    "lightning-lean": "Lightning, everything switched off",
    "lightning-default": "Lightning, as it comes",
}

BY_HAND = [OURS, "hand", "hand-naive"]
"""Loops that read images the same way, with the same workers."""

OUR_FEED = "feed-ours"
FEEDS = {
    OUR_FEED: "this trainer's feed",
    "feed-hand": "torch_xla's MpDeviceLoader",
    "feed-plain": "torch's DataLoader, without a device",
}

PLAIN = "plain"
CHECKPOINT_EVERY = 50
CHECKS = {
    "programs": "equal programs (first steps, after recompilations)",
    "counters": "the runtime's counters (every step)",
    "checkup": "slow hosts, input, equal parameters (every 100 steps)",
}

PLAIN_PAIR = "plain-pair"
"""Nothing switched on, with one host and with two; the second is the baseline for what only several replicas do."""

FEATURES = {
    "checkpoint": f"checkpoint every {CHECKPOINT_EVERY} steps",
    "tensorboard": "TensorBoard",
    "noise-scale": "gradient noise scale (2 hosts)",
}
WITHOUT = {"checkpoint": PLAIN, "tensorboard": PLAIN, "noise-scale": PLAIN_PAIR}
