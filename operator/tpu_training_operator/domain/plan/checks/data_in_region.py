"""Whether the job's buckets are near its slice: the condition DataInRegion, from what the entry check has found.

Only the check has the job's identity. Its pod runs an image of any origin, so its message can have any
form.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.entry_check import DataInRegion
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.plan.checks.locality import Bucket, Near, judge_locality, region_of
from tpu_training_operator.domain.plan.common.context import Context

_MOST_BUCKETS = 8
_LONGEST = 200
_REASONS = {
    Near.LOCAL: (True, Reason.BUCKETS_IN_REGION),
    Near.REMOTE: (False, Reason.BUCKET_OUTSIDE_REGION),
    Near.UNKNOWN: (None, Reason.BUCKET_REGION_UNKNOWN),
}


def record_distance(ctx: Context, status: Status) -> Status:
    """Returns the status, with the condition if the check has asked about a bucket."""
    judgement = _judge(ctx)
    if judgement is None:
        return status
    near, message = judgement
    value, reason = _REASONS[near]
    return ctx.with_condition(status, ConditionType.DATA_IN_REGION, value, reason, message)


def explain_distance(ctx: Context) -> str | None:
    """Says why the job may not begin, by spec.entryCheck.dataInRegion; None if it may."""
    if ctx.job.spec.entry_check.data_in_region is not DataInRegion.REQUIRE or not list(_list_uris(ctx)):
        return None
    judgement = _judge(ctx)
    if judgement is None:
        return "the entry check did not say where the job's buckets are"
    near, message = judgement
    return None if near is Near.LOCAL else message


def _judge(ctx: Context) -> tuple[Near, str] | None:
    pod = ctx.observed.entry_check_pod
    places_seen = (pod.trainer_message or {}).get("places") if pod is not None else None
    if ctx.job.spec.entry_check.data_in_region is DataInRegion.IGNORE or not isinstance(places_seen, Mapping):
        return None
    listed = places_seen.get("buckets")
    buckets = (
        [_read_bucket(bucket) for bucket in listed if isinstance(bucket, Mapping)] if isinstance(listed, list) else []
    )
    if not buckets:
        return None
    selector = ctx.job.spec.trainer.node_selector or {}
    places = (
        selector.get(constants.NODE_LABEL_ZONE),
        selector.get(constants.NODE_LABEL_REGION),
        _read_text(places_seen, "zone"),
    )
    region = next((region for place in places if place and (region := region_of(place))), "")
    return judge_locality(buckets[:_MOST_BUCKETS], region)


def _read_bucket(fields: Mapping[str, Any]) -> Bucket:
    regions = fields.get("regions")
    listed = regions if isinstance(regions, list) else []
    chosen = [plain(region)[:_LONGEST].lower() for region in listed if isinstance(region, str)]
    texts = {name: _read_text(fields, name) for name in ("name", "location", "trouble", "said")}
    return Bucket(regions=tuple(chosen[:2]), **{**texts, "location": texts["location"].lower()})


def _read_text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return plain(value)[:_LONGEST] if isinstance(value, str) else ""


def _list_uris(ctx: Context) -> Iterator[str]:
    spec = ctx.job.spec
    uris = [spec.data.uri if spec.data else None, spec.report.uri if spec.report else None]
    if (checkpoint := spec.checkpoint) is not None:
        begins = checkpoint.init_from.uri if checkpoint.init_from else None
        uris += [checkpoint.uri, checkpoint.resume_from, begins]
    return (uri for uri in uris if uri and uri.startswith("gs://"))
