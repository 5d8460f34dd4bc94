"""Kernels that only a TPU can run: those in Pallas, which torch_xla lowers with jax while it traces.

jax lowers for the machine that it is on. On a CPU it refuses, although the kernel is right.
"""

from __future__ import annotations

from typing import Any

_REFUSAL = "Only interpret mode is supported on CPU backend"


def is_kernel_without_tpu(error: BaseException | None) -> bool:
    """Returns whether jax refused a kernel because this machine has no TPU."""
    while error is not None:
        if isinstance(error, ValueError) and _REFUSAL in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def lower_kernels_for_tpus() -> None:
    """Makes torch_xla lower kernels for TPUs in this process, which does not run them."""
    from torch_xla.experimental import custom_kernel

    trace = custom_kernel.trace_pallas

    def trace_for_tpus(*args: Any, **settings: Any) -> Any:
        # jax takes long to import, and few tasks have a kernel.
        from jax._src import stages, xla_bridge

        # A worker's jax asks its libtpu which version of a kernel it reads; the oldest suits every libtpu.
        xla_bridge.FORCE_FORWARD_COMPAT_LOWERING_PLATFORMS.add("tpu")
        (stages.Traced.lower.__kwdefaults__ or {})["lowering_platforms"] = ("tpu",)
        return trace(*args, **settings)

    custom_kernel.trace_pallas = trace_for_tpus
