"""One token bucket for each of many: jobs that report, addresses that are refused. Used by `server`."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from tpu_training_operator.kube.throttle import Throttle
from tpu_training_operator.runtime.progress.refused import Refused

Key = TypeVar("Key")

# Of the keys that come and go, as many are remembered as a cluster has jobs, and then some.
_MOST_KEYS = 10_000


class Limits(Generic[Key]):
    """Each key may do something `burst` times at once and `per_second` on average. The key that was quiet for longest
    is forgotten first, and starts with a full bucket when it comes again."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[Key, Throttle] = OrderedDict()

    def take(self, key: Key, why: str) -> None:
        """The key does it once more. Raises Refused (429), with the reason `why`, while it may not."""
        bucket = self._buckets.pop(key, None) or Throttle(self._per_second, self._burst, self._clock)
        self._buckets[key] = bucket
        if wait := bucket.due():
            raise Refused(429, why, wait)
        bucket.take()
        if len(self._buckets) > _MOST_KEYS:
            self._buckets.popitem(last=False)

    def give_back(self, key: Key) -> None:
        """What was taken last does not count after all."""
        if bucket := self._buckets.get(key):
            bucket.give_back()
