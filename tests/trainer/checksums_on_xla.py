"""The parameters' checksums on an XLA device and on the CPU; prints that they are equal.

Run by `test_doctor_parameters`.
"""

from __future__ import annotations

import torch
import torch_xla
from torch_xla.debug import metrics

from tests.trainer.doctor.test_doctor_parameters import DTYPES, tensor_of
from tpu_trainer.doctor.agreement import checksums

if __name__ == "__main__":
    here = [tensor_of(dtype) for dtype in DTYPES if not dtype.is_complex] + [torch.randn(300, 500), torch.tensor(2.5)]
    there = [tensor.to(torch_xla.device()) for tensor in here]
    (sums,) = torch_xla._XLAC._xla_get_cpu_tensors([checksums(there)])
    assert sums.tolist() == checksums(here).tolist(), (sums.tolist(), checksums(here).tolist())
    assert not metrics.executed_fallback_ops(), metrics.executed_fallback_ops()
    print("equal")
