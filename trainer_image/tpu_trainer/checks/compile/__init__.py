"""Compiles a job's step for its TPU slice on a machine without a TPU: whether it fits, and what it costs at best.

`python -m tpu_trainer compile-check` (`command`) compiles with libtpu (`compiling`) what torch_xla has traced in
another process (`tracing`), because each brings an XLA. Nothing is run.
"""
