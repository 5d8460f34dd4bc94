"""A cache of parsed specs and statuses.

In most passes a job has the same spec and status as in the last one, and parsing them takes longer than planning. The
keys of the cache are their JSON, so a change is always parsed, and no entry can be out of date.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import orjson

from tpu_training_operator.api.status import Status
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.options import SliceOption, options_of
from tpu_training_operator.domain.job.rungs import lower_rungs_of

Parsed = tuple[SliceOption, ...]

# The metadata that parsing reads; the rest changes without changing the job.
_METADATA = ("name", "namespace", "uid", "generation", "creationTimestamp")
# A small job takes 20 KiB of memory once parsed. Users choose how large a job is and how many there are, so both are
# bounded.
_MOST = 512
_LONGEST = 8 * 2**10


class ParseCache:
    """Keeps the `most` recently used specs and statuses; 0: none."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Parsed | Status] = OrderedDict()

    def status(self, body: Any) -> Status:
        """Returns the status in `body`, which may be absent."""
        return cast("Status", self._recall({"status": body}, lambda: Status.read(body)))

    def job(self, body: Mapping[str, Any]) -> Parsed:
        """Returns the parsed job once for each slice that it may run on. Raises InvalidJob."""
        selected = _select_parsed(body)
        return cast("Parsed", self._recall({"job": selected}, lambda: _read(selected)))

    def lower_rungs(self, body: Mapping[str, Any]) -> Parsed:
        """Returns the rungs of the job's ladder below the job itself. Raises InvalidJob."""
        if not isinstance(body.get("spec"), Mapping) or body["spec"].get("ladder") is None:
            return ()
        selected = _select_parsed(body)
        return cast("Parsed", self._recall({"ladder": selected}, lambda: lower_rungs_of(parse_job(selected))))

    def _recall(self, selected: Any, read: Callable[[], Parsed | Status]) -> Parsed | Status:
        key = _make_key(selected) if self._most else None
        if key is None:
            return read()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        parsed = self._known[key] = read()
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return parsed


def _select_parsed(body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: body["metadata"][name] for name in _METADATA if name in body["metadata"]}
    return {name: value for name, value in body.items() if name != "status"} | {"metadata": metadata}


def _read(body: Mapping[str, Any]) -> Parsed:
    return options_of(parse_job(body))


def _make_key(value: Any) -> bytes | None:
    """Returns the cache's key for a value; None if it is too long to keep, or not plain JSON."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    return text if len(text) <= _LONGEST else None
