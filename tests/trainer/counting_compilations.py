"""`python -m tpu_trainer` that ends by printing how many graphs XLA has compiled."""

from __future__ import annotations

import sys

from tpu_trainer.entry import main

if __name__ == "__main__":
    code = main()
    from torch_xla.debug import metrics

    print("compilations:", metrics.metric_data("CompileTime")[0], flush=True)
    sys.exit(code)
