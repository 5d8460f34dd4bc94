"""`python -m examples.own_loop_tpu` whose chips' process is forked: a spawned one imports torch_xla for six seconds."""

from __future__ import annotations

import functools

import torch_xla
from examples import own_loop_tpu

torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")

if __name__ == "__main__":
    own_loop_tpu.main()
