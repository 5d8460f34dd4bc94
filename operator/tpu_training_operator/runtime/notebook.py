"""The reconciler's notes on jobs, and the events that it looks up for them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from tpu_training_operator.domain.lifecycle.waiting import line_of
from tpu_training_operator.domain.report import Notes, PodEvents
from tpu_training_operator.kube.cluster import EVENTS, Cluster, JobKey
from tpu_training_operator.kube.errors import ApiError

log = logging.getLogger(__name__)


class Notebook:
    def __init__(self, cluster: Cluster, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._notes: dict[JobKey, Notes] = {}
        self._may_list = True

    def of(self, key: JobKey) -> Notes:
        return self._notes.get(key, Notes())

    def wrote_status(self, key: JobKey) -> None:
        self._notes[key] = replace(self.of(key), written=self._clock())

    async def look_at_events(self, key: JobKey, pods: Mapping[str, str]) -> None:
        """Those of the pods, by name and uid. Where they cannot be had, the job goes on without them."""
        lines = {}
        try:
            for name, uid in pods.items():
                found: Sequence[dict[str, object]] = await self._cluster.list(
                    EVENTS, key.namespace, None, {"regarding.uid": uid}
                )
                if line := line_of(found):
                    lines[name] = line
        except ApiError as error:
            log.log(
                logging.WARNING if self._may_list else logging.DEBUG,
                "the events of pods cannot be read: %s",
                error,
                extra={"job": str(key)},
            )
            self._may_list = False
        self._notes[key] = replace(self.of(key), events=PodEvents(self._clock(), lines))

    def forget(self, key: JobKey) -> None:
        self._notes.pop(key, None)
