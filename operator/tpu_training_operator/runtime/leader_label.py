"""The label by which the Service for progress reports finds the operator that works.

Only that one listens to workers. The one that waits is ready, too: a rollout, a PodDisruptionBudget and `helm --wait`
count ready pods.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from tpu_training_operator.kube.cluster import PODS, Object, Resource
from tpu_training_operator.kube.errors import ApiError, Unavailable

LABEL_LEADS = "tpu-operator.dev/leads"
_RETRY_SECONDS = 2.0
_KEEP_SECONDS = 30.0

log = logging.getLogger(__name__)


class Pods(Protocol):
    """The part of a cluster that this needs. Raises ApiErrors."""

    async def patch(self, resource: Resource, namespace: str, name: str, body: Object) -> Object: ...


@dataclass(frozen=True)
class OwnPod:
    """The pod of this process. Its container may have had a predecessor that was killed while it led."""

    pods: Pods
    namespace: str
    name: str

    async def keep_telling(self) -> None:
        """Keeps the label while this process leads: an edit may take it away, and a refusal may pass."""
        while True:
            await self.tell(leads=True)
            await asyncio.sleep(_KEEP_SECONDS)

    async def tell(self, *, leads: bool) -> None:
        """Sets the label or takes it away. Returns when the API server has done so or refuses to."""
        body = {"metadata": {"labels": {LABEL_LEADS: "true" if leads else None}}}
        while True:
            try:
                await self.pods.patch(PODS, self.namespace, self.name, body)
                return
            except Unavailable as error:
                log.warning("the operator's pod cannot be labelled yet: %s", error)
            except ApiError as error:
                where = f"{self.namespace}/{self.name}"
                log.error(
                    "workers cannot report, because pod %s cannot get the label %s: %s", where, LABEL_LEADS, error
                )
                return
            await asyncio.sleep(_RETRY_SECONDS)
