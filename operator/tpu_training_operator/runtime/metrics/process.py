"""The process itself: its version, and how long what is due in its event loop has to wait."""

import asyncio

from prometheus_client import CollectorRegistry, Gauge, Histogram

from tpu_training_operator import __version__

_LOOK_SECONDS = 1.0


def register_build_info(registry: CollectorRegistry) -> None:
    info = Gauge("tpujob_build_info", "Always 1; the version is in the label.", ["version"], registry=registry)
    info.labels(__version__).set(1)


class LoopLag:
    """A late loop means blocking code or a starved process: hints, probes and reports are then late, too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "tpujob_event_loop_lag_seconds",
            "How much later than asked for the event loop woke up, looked at once a second.",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )

    async def watch(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            self._lag.observe(max(0.0, loop.time() - due))
