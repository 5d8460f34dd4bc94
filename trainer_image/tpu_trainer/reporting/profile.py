"""Captures a profiler trace of a few steps beside the report (`report.profile`): an XPlane for TensorBoard's profile
plugin with torch_xla, a trace of torch.profiler's with backend Torch. A profiler that fails ends no run.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_trainer.contract.findings import Finding
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.reporting.throughput import WARM_STEPS


class ProfileCapture:
    """One capture of `steps` steps, once those of the process that compile are over. `first`: the steps made before."""

    def __init__(self, outputs: RunOutputs, steps: int, first: int, *, with_torch: bool) -> None:
        self._outputs, self._steps = outputs, steps
        self._capture: _TorchCapture | _XlaCapture = _TorchCapture() if with_torch else _XlaCapture()
        self._begins, self._is_over, self._is_running = first + WARM_STEPS, False, False

    def is_due(self, step: int, *, ends: bool) -> bool:
        """Returns whether the capture begins or ends after `step`."""
        return not self._is_over and (ends or step in (self._begins, self._begins + self._steps))

    def after_step(self, step: int, *, ends: bool) -> None:
        if not self.is_due(step, ends=ends):
            return
        try:
            if self._is_running:
                self._is_over = True
                self._outputs.reporter.add_profile(self._capture.stop(), f"steps {self._begins + 1} to {step}")
                self._outputs.progress.say(f"profiled steps {self._begins + 1} to {step}")
            elif ends:
                self._warn(step, f"the run ended before step {self._begins + 1}, the first that is profiled")
            elif not self._outputs.reporter.has_place:
                self._warn(step, "no place for the report is named (spec.report.uri)")
            else:
                self._capture.start()
                self._is_running = True
        except Exception as error:
            self._warn(step, f"{type(error).__name__}: {error}")

    def _warn(self, step: int, why: str) -> None:
        self._is_over = True
        self._outputs.add_finding(Finding("Profile", step, f"no profile was captured: {why}"))


class _XlaCapture:
    def start(self) -> None:
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import profiler

        xm.wait_device_ops()
        self._directory = tempfile.TemporaryDirectory(prefix="profile-")
        profiler.start_trace(self._directory.name)

    def stop(self) -> Mapping[str, bytes]:
        """Returns the files as plugins/profile/TIME/HOST.xplane.pb, where the profile plugin looks for them."""
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import profiler

        xm.wait_device_ops()
        with self._directory as place:
            profiler.stop_trace()
            files = (path for path in sorted(Path(place).rglob("*")) if path.is_file())
            return {path.relative_to(place).as_posix(): path.read_bytes() for path in files}


class _TorchCapture:
    def start(self) -> None:
        from torch.profiler import profile

        self._profile: Any = profile()
        self._profile.start()

    def stop(self) -> Mapping[str, bytes]:
        """Returns the file as HOST.TIME.pt.trace.json, as torch.profiler's plugin for TensorBoard has it; Perfetto
        opens it, too."""
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="profile-") as place:
            path = Path(place) / f"{socket.gethostname()}.{time.time_ns() // 10**6}.pt.trace.json"
            self._profile.export_chrome_trace(str(path))
            return {path.name: path.read_bytes()}
