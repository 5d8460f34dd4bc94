"""Where a bucket is, against where the slice is."""

import pytest

from tpu_training_operator.domain.job.trainer_report import Bucket
from tpu_training_operator.domain.plan.checks.data_in_region import judge_locality, region_of

US = "us-central1"


@pytest.mark.parametrize(
    ("place", "region"),
    [
        ("us-central1-b", "us-central1"),
        ("europe-west4-a", "europe-west4"),
        ("northamerica-northeast1-c", "northamerica-northeast1"),
        ("us-east5", "us-east5"),
        ("US", ""),
        ("", ""),
        ("; rm -rf", ""),
    ],
)
def test_the_region_of_a_place(place: str, region: str) -> None:
    assert region_of(place) == region


@pytest.mark.parametrize(
    ("location", "regions", "region", "near"),
    [
        ("us-central1", (), US, True),
        ("us-east1", (), US, False),
        ("us", (), US, True),
        ("eu", (), US, False),
        ("eu", (), "europe-west4", True),
        ("eu", (), "europe-west2", False),
        ("asia", (), "asia-northeast1", True),
        ("nam4", (), US, True),
        ("nam4", (), "us-west4", False),
        ("us", ("us-central1", "us-south1"), US, True),
        ("us", ("us-east1", "us-south1"), US, False),
        ("eur9", (), "europe-west4", None),
        ("us-central1", (), "", None),
    ],
)
def test_a_bucket_is_near_if_one_of_its_regions_is_the_slices(
    location: str, regions: tuple[str, ...], region: str, near: bool | None
) -> None:
    assert judge_locality([Bucket(name="data", location=location, regions=[*regions])], region)[0] is near


def test_what_is_far_says_what_it_costs() -> None:
    assert judge_locality([Bucket(name="data", location="europe-west4")], US) == (
        False,
        "gs://data is in europe-west4, and the slice is in us-central1: every read crosses regions, which is slower,"
        " and Google charges each GiB read at its rate between continents",
    )
    for location in ("us-east1", "northamerica-northeast1"):
        assert "as a transfer between regions" in judge_locality([Bucket(name="data", location=location)], US)[1]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("identity", "no valid Google identity"),
        ("denied", "storage.buckets.get"),
        ("missing", "there is no such bucket"),
        ("unavailable", "did not answer"),
        ("newer", "did not answer"),
    ],
)
def test_what_is_not_known_says_why(trouble: str, words: str) -> None:
    near, message = judge_locality([Bucket(name="data", trouble=trouble, said="HTTP Error 503")], US)
    assert near is None
    assert words in message
    assert message.endswith("HTTP Error 503")


def test_the_worst_bucket_decides_and_is_named_first() -> None:
    near, message = judge_locality(
        [Bucket(name="here", location=US), Bucket(name="dark", trouble="denied"), Bucket(name="far", location="eu")], US
    )
    assert near is False
    assert [message.index(name) for name in ("far", "dark", "here")] == sorted(
        message.index(name) for name in ("far", "dark", "here")
    )
