"""Compiles a job's step for its TPU slice on a machine without a TPU: whether it fits, and what it costs at best.

`python -m tpu_trainer compile-check` (`command`). torch_xla traces the step (`tracing`) and libtpu compiles it
(`compiling`), each in a process of its own, because each brings an XLA. Nothing is run.
"""
