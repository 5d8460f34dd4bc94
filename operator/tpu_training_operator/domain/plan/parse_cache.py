"""What a job's spec and status say, remembered from one look to the next.

Most looks at a job find the spec and the status that the last one found, and reading them takes longer than deciding.
The memory goes by their content: whatever has changed, by whomever, is read again, and nothing can be out of date.
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

# Of the metadata, only this is read: the rest changes without changing the job.
_METADATA = ("name", "namespace", "uid", "generation", "creationTimestamp")
# A small job takes 20 KiB as objects. Users choose how large a job is, and how many there are.
_MOST = 512
_LONGEST = 8 * 2**10


class ParseCache:
    """`most`: how many specs and statuses are remembered, the latest ones; 0: none."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Parsed | Status] = OrderedDict()

    def status(self, body: Any) -> Status:
        """Returns the status in `body`, which may be absent."""
        return cast("Status", self._remembered({"status": body}, lambda: Status.read(body)))

    def job(self, body: Mapping[str, Any]) -> Parsed:
        """Returns the job without its status, on each of the slices that it may run on. Raises InvalidJob."""
        said = _said(body)
        return cast("Parsed", self._remembered({"job": said}, lambda: _read(said)))

    def lower_rungs(self, body: Mapping[str, Any]) -> Parsed:
        """Returns the rungs of the job's ladder below the job itself. Raises InvalidJob."""
        if not isinstance(body.get("spec"), Mapping) or body["spec"].get("ladder") is None:
            return ()
        said = _said(body)
        return cast("Parsed", self._remembered({"ladder": said}, lambda: lower_rungs_of(parse_job(said))))

    def _remembered(self, said: Any, read: Callable[[], Parsed | Status]) -> Parsed | Status:
        content = _content(said) if self._most else None
        if content is None:
            return read()
        if content in self._known:
            self._known.move_to_end(content)
            return self._known[content]
        found = self._known[content] = read()
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return found


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: body["metadata"][name] for name in _METADATA if name in body["metadata"]}
    return {name: value for name, value in body.items() if name != "status"} | {"metadata": metadata}


def _read(body: Mapping[str, Any]) -> Parsed:
    return options_of(parse_job(body))


def _content(value: Any) -> bytes | None:
    """None for what is too long to keep, or is no plain JSON."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    return text if len(text) <= _LONGEST else None
