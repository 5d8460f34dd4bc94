"""torch_xla without what no step needs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

from tpu_trainer.gang.backends.torch_xla_import import KNOWN

SCRIPT = """
import json, sys
from tpu_trainer.gang.backends.torch_xla_import import import_torch_xla
import_torch_xla()
import torch, torch_xla
left_out = [name for name in ("torch._inductor.lowering", "torch._functorch.aot_autograd") if name not in sys.modules]
left_in = [name for name in ("torch_xla.stablehlo", "functorch.compile") if name in sys.modules]
model = torch.nn.GRU(3, 4).to("xla")
model(torch.ones(2, 1, 3, device="xla"))[0].sum().backward()
torch_xla.sync()
finite = all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
import functorch.compile
answer = {
    "left out": left_out,
    "left in": left_in,
    "GRU": type(model).__module__,
    "finite": finite,
    "asked for": torch_xla.stablehlo.__name__,
    "function": functorch.compile.aot_function.__module__,
    "missing": hasattr(torch_xla, "no_such_name"),
    "exported": "stablehlo" in torch_xla.save_as_stablehlo.__name__,
}
print(json.dumps(answer))
"""


def test_torch_xla_is_whole_without_torchs_compilers() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "left out": ["torch._inductor.lowering", "torch._functorch.aot_autograd"],
        "left in": [],
        "GRU": "torch_xla.experimental.gru",
        "finite": True,
        "asked for": "torch_xla.stablehlo",
        "function": "torch._functorch.aot_autograd",
        "missing": False,
        "exported": True,
    }


def test_the_installed_release_is_the_known_one() -> None:
    """Another one may import other things: see which, and whether they are needed."""
    assert version("torch_xla").startswith(KNOWN)
