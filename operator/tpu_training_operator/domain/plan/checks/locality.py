"""Whether a bucket is where the slice is, in words for people.

Google's names: a region (us-central1), a multi-region (US), a dual-region with a name of its own (NAM4) or of two
regions that the owner chose (a multi-region's name, with data locations).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

_ZONE = re.compile(r"^([a-z]+-[a-z]+[0-9]+)-[a-z]+$")
_REGION = re.compile(r"^[a-z]+-[a-z]+[0-9]+$")
_NAMED_PAIRS = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}
# The EU's data stays in its member states: not in London or Zurich.
_MULTI_REGIONS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
_OUTSIDE = {"eu": ("europe-west2", "europe-west6")}

# No figures: prices change, and differ between regions.
_SAME_CONTINENT = "Google charges each GiB that it reads as a transfer between regions"
_OTHER_CONTINENT = "Google charges each GiB that it reads at its rate between continents"
_SLOW = "every read crosses regions, which is slower, and"

_TROUBLES = {
    "identity": "the job's service account has no valid Google identity (Workload Identity Federation)",
    "denied": "the job's service account may not ask: it needs storage.buckets.get (roles/storage.bucketViewer)",
    "missing": "there is no such bucket, or the job's service account may not see it",
    "unavailable": "the storage could not be asked",
}


class Near(Enum):
    LOCAL = auto()
    REMOTE = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class Bucket:
    """`location`: "" if it is unknown, because of `trouble`, in the words `said`. `regions`: the two that the owner of
    a dual-region has chosen."""

    name: str
    location: str = ""
    regions: tuple[str, ...] = ()
    trouble: str = ""
    said: str = ""


def region_of(place: str) -> str:
    """Returns the region of a zone or a region; "" for any other text."""
    if match := _ZONE.match(place):
        return match[1]
    return place if _REGION.match(place) else ""


def judge_locality(buckets: Sequence[Bucket], region: str) -> tuple[Near, str]:
    """Judges all buckets together, the worst first. `region`: the slice's, "" if it is unknown."""
    judgements = [_judge(bucket, region) for bucket in buckets]
    order = (Near.REMOTE, Near.UNKNOWN, Near.LOCAL)
    worst = min((near for near, _ in judgements), key=order.index, default=Near.LOCAL)
    return worst, "; ".join(text for kind in order for near, text in judgements if near is kind)


def _judge(bucket: Bucket, region: str) -> tuple[Near, str]:
    name = f"gs://{bucket.name}"
    if bucket.trouble or not bucket.location:
        why = _TROUBLES.get(bucket.trouble, _TROUBLES["unavailable"])
        return Near.UNKNOWN, f"{name}: {why}" + (f": {bucket.said}" if bucket.said else "")
    if not region:
        where = "the slice's region is not known; set topology.kubernetes.io/region in trainer.nodeSelector"
        return Near.UNKNOWN, f"{name} is in {bucket.location}; {where}"
    if pair := bucket.regions or _NAMED_PAIRS.get(bucket.location, ()):
        what = f"the dual-region of {' and '.join(pair)}"
        return _within(name, what, region in pair, region, pair[0])
    if bucket.location in _MULTI_REGIONS:
        prefix, outside = _MULTI_REGIONS[bucket.location], _OUTSIDE.get(bucket.location, ())
        is_inside = region.startswith(prefix) and region not in outside
        return _within(name, f"the multi-region {bucket.location.upper()}", is_inside, region, prefix)
    if not _REGION.match(bucket.location):
        return Near.UNKNOWN, f"{name} is in {bucket.location}, which this operator does not know"
    return _within(name, bucket.location, bucket.location == region, region, bucket.location)


def _continent(region: str) -> str:
    """Returns how the names of the regions there begin; those of North America begin in two ways."""
    name = region.partition("-")[0]
    return "northamerica" if name == "us" else name


def _within(name: str, what: str, is_inside: bool, region: str, like: str) -> tuple[Near, str]:
    if is_inside:
        with_it = "as the slice is" if what == region else f"which has {region}"
        return Near.LOCAL, f"{name} is in {what}, {with_it}"
    cost = _SAME_CONTINENT if _continent(like) == _continent(region) else _OTHER_CONTINENT
    return Near.REMOTE, f"{name} is in {what}, and the slice in {region}: {_SLOW} {cost}"
