"""What the run stood on, for the report's last section."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "torch_xla", "libtpu", "numpy", "pytorch-lightning", "transformers")
"""Those whose version changes what a training computes, or how fast."""


def versions(device: str) -> dict[str, str]:
    """Name to version, of what is installed. `device`: what the model is on, as torch names it."""
    found = {"Device": device, "Machine": f"{platform.machine()}, {platform.system()} {platform.release()}"}
    found["Python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
