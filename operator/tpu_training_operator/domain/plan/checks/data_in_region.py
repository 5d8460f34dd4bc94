"""Whether the job's buckets are near its slice: the condition DataInRegion, from what the entry check has found.

Only the check's pod has the job's identity. It runs the user's image, so its message may hold anything.

Google names a bucket's location in four ways: a region (us-central1), a multi-region (US), a dual-region with its own
name (NAM4) or of two regions that the owner chose (a multi-region's name, with data locations).
"""

import re
from collections.abc import Iterator, Sequence

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.entry_check import DataInRegion
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.job.trainer_report import Bucket
from tpu_training_operator.domain.plan.common.context import Context

_ZONE = re.compile(r"^([a-z]+-[a-z]+[0-9]+)-[a-z]+$")
_REGION = re.compile(r"^[a-z]+-[a-z]+[0-9]+$")
_NAMED_PAIRS = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}
# The multi-region EU keeps data in member states, so neither in London nor in Zurich.
_MULTI_REGIONS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
_OUTSIDE = {"eu": ("europe-west2", "europe-west6")}

# These clauses name no prices, which change and differ between regions.
_SAME_CONTINENT = "Google charges each GiB read as a transfer between regions"
_OTHER_CONTINENT = "Google charges each GiB read at its rate between continents"
_SLOW = "every read crosses regions, which is slower, and"

_TROUBLES = {
    "identity": "the job's service account has no valid Google identity (Workload Identity Federation)",
    "denied": (
        "the job's service account may not read the bucket's location: it needs storage.buckets.get"
        " (roles/storage.bucketViewer)"
    ),
    "missing": "there is no such bucket, or the job's service account may not see it",
    "unavailable": "the storage service did not answer",
}

_MOST_BUCKETS = 8


_REASONS = {
    True: Reason.BUCKETS_IN_REGION,
    False: Reason.BUCKET_OUTSIDE_REGION,
    None: Reason.BUCKET_REGION_UNKNOWN,
}
# Whether a bucket is near, or None if that is unknown, and an explanation.
Judgement = tuple[bool | None, str]


def record_distance(ctx: Context, status: Status) -> Status:
    """Returns the status with the condition DataInRegion, if the check has asked about a bucket."""
    judgement = _judge(ctx)
    if judgement is None:
        return status
    near, message = judgement
    return ctx.with_condition(status, ConditionType.DATA_IN_REGION, near, _REASONS[near], message)


def explain_distance(ctx: Context) -> str | None:
    """Says why spec.entryCheck.dataInRegion keeps the job from starting; None if it does not."""
    if ctx.job.spec.entry_check.data_in_region is not DataInRegion.REQUIRE or not list(_list_uris(ctx)):
        return None
    judgement = _judge(ctx)
    if judgement is None:
        return "the entry check did not say where the job's buckets are"
    near, message = judgement
    return None if near else message


def _judge(ctx: Context) -> Judgement | None:
    pod = ctx.observed.entry_check_pod
    seen = pod.trainer_message.places if pod is not None and pod.trainer_message is not None else None
    if ctx.job.spec.entry_check.data_in_region is DataInRegion.IGNORE or seen is None or not seen.buckets:
        return None
    selector = ctx.job.spec.trainer.node_selector or {}
    places = (
        selector.get(constants.NODE_LABEL_ZONE),
        selector.get(constants.NODE_LABEL_REGION),
        seen.zone,
    )
    region = next((region for place in places if place and (region := region_of(place))), "")
    return judge_locality(seen.buckets[:_MOST_BUCKETS], region)


def _list_uris(ctx: Context) -> Iterator[str]:
    spec = ctx.job.spec
    uris = [spec.data.uri if spec.data else None, spec.report.uri if spec.report else None]
    if (checkpoint := spec.checkpoint) is not None:
        begins = checkpoint.init_from.uri if checkpoint.init_from else None
        uris += [checkpoint.uri, checkpoint.resume_from, begins]
    return (uri for uri in uris if uri and uri.startswith("gs://"))


def region_of(place: str) -> str:
    """Returns the region of a zone or a region; "" for any other text."""
    if match := _ZONE.match(place):
        return match[1]
    return place if _REGION.match(place) else ""


def judge_locality(buckets: Sequence[Bucket], region: str) -> Judgement:
    """Judges all buckets together, the worst first. `region`: the slice's, "" if it is unknown."""
    judgements = [_judge_bucket(bucket, region) for bucket in buckets]
    order = (False, None, True)
    worst = min((near for near, _ in judgements), key=order.index, default=True)
    return worst, "; ".join(text for kind in order for near, text in judgements if near is kind)


def _judge_bucket(bucket: Bucket, region: str) -> Judgement:
    name = f"gs://{bucket.name}"
    if bucket.trouble or not bucket.location:
        why = _TROUBLES.get(bucket.trouble, _TROUBLES["unavailable"])
        return None, f"{name}: {why}" + (f": {bucket.said}" if bucket.said else "")
    if not region:
        where = "the slice's region is not known; set topology.kubernetes.io/region in trainer.nodeSelector"
        return None, f"{name} is in {bucket.location}; {where}"
    if pair := tuple(bucket.regions[:2]) or _NAMED_PAIRS.get(bucket.location, ()):
        what = f"the dual-region of {' and '.join(pair)}"
        return _judge_place(name, what, region in pair, region, pair[0])
    if bucket.location in _MULTI_REGIONS:
        prefix, outside = _MULTI_REGIONS[bucket.location], _OUTSIDE.get(bucket.location, ())
        is_inside = region.startswith(prefix) and region not in outside
        return _judge_place(name, f"the multi-region {bucket.location.upper()}", is_inside, region, prefix)
    if not _REGION.match(bucket.location):
        return None, f"{name} is in {bucket.location}, which this operator does not know"
    return _judge_place(name, bucket.location, bucket.location == region, region, bucket.location)


def _continent(region: str) -> str:
    """Returns the continent as regions' names begin with it; us-* regions belong to northamerica."""
    name = region.partition("-")[0]
    return "northamerica" if name == "us" else name


def _judge_place(name: str, what: str, is_inside: bool, region: str, like: str) -> Judgement:
    if is_inside:
        with_it = "as the slice is" if what == region else f"which includes {region}"
        return True, f"{name} is in {what}, {with_it}"
    cost = _SAME_CONTINENT if _continent(like) == _continent(region) else _OTHER_CONTINENT
    return False, f"{name} is in {what}, and the slice is in {region}: {_SLOW} {cost}"
