"""How much of the hardware's peak a run reaches: the model flops utilisation."""

from __future__ import annotations

TERAFLOPS = {"v2": 46, "v3": 123, "v4": 275, "v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 2307}
"""Peak dense bf16 TFLOP/s of one chip, from the "System architecture" pages of the Cloud TPU documentation.

A model in float32 is measured against the same peak: it is what the hardware offers, and what bf16 would buy.
"""

REPLICAS_PER_CHIP = {"v2": 2, "v3": 2, "tpu7x": 2}
"""Devices that a framework sees per chip, each with half of the peak; one on every other generation."""


def replica_peak(generation: str) -> float | None:
    """FLOP/s of one replica's device; None for a generation without a known peak (CPU hosts among them)."""
    teraflops = TERAFLOPS.get(generation)
    return None if teraflops is None else teraflops * 1e12 / REPLICAS_PER_CHIP.get(generation, 1)


def mfu(flops_per_step: float, replicas: int, step_seconds: float, generation: str) -> float | None:
    """Model flops utilisation, 0..1: the model's own operations over what the slice could have done in that time.

    flops_per_step: of all replicas together; operations that are done twice (rematerialised) count once.
    PaLM (Chowdhery et al. 2022), appendix B. None where the peak is not known, or there is nothing to divide by.
    """
    peak = replica_peak(generation)
    if peak is None or step_seconds <= 0 or flops_per_step <= 0:
        return None
    return flops_per_step / (peak * replicas * step_seconds)
