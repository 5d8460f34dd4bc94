"""What all API models share: camelCase on the wire, no unknown fields, bounded types, rules between fields.

A `Rule` says one thing twice, in CEL for the API server and in Python for `tpujob` and the operator. The two stand side
by side, so that they are read and changed together, and the control plane tests compare them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

_SELF = re.compile(r"\bself\b")


@dataclass(frozen=True)
class Rule:
    """A condition between fields of one model.

    `cel` and `holds` decide the same thing. `holds` is None for rules about a change (CEL's `oldSelf`), which only
    the API server can judge. The API server shows `message`; `explain`, if given, writes a better one for the
    value. `field` is the path of the offending field below the model, empty for the model itself.

    `at_creation`: hardly anything that the rule reads can change later, so the API server judges it when the object is
    created and never again. A job from before the rule must still take a status and a suspension. Rules below the spec
    do not need it: the API server itself skips values that an update does not change.

    `is_mutable`: something that the rule reads can change later. Then an update must not break it, unless the job broke
    it before.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None
    field: str = ""
    explain: Callable[[Any], str] | None = None
    at_creation: bool = False
    is_mutable: bool = False

    def is_broken_by(self, value: Any) -> bool:
        """Returns whether the value breaks the rule. No single value breaks a rule about a change."""
        return self.holds is not None and not self.holds(value)

    def text(self, value: Any) -> str:
        return self.explain(value) if self.explain else self.message

    def as_schema(self) -> dict[str, str | bool]:
        schema: dict[str, str | bool] = {"rule": self.cel, "message": self.message}
        if self.at_creation:
            before = _SELF.sub("oldSelf.value()", self.cel)
            skipped = f"oldSelf.hasValue() && !({before})" if self.is_mutable else "oldSelf.hasValue()"
            schema |= {"rule": f"{skipped} || ({self.cel})", "optionalOldSelf": True}
        if self.field:
            schema["fieldPath"] = f".{self.field}"
        return schema


class ApiModel(BaseModel):
    """Base of the spec's models: immutable, and strict about unknown fields."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        """Takes null for a field that is not given, as the API server does; `entryCheck:` with nothing behind it."""
        if not isinstance(data, Mapping) or None not in data.values():
            return data
        optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.as_schema() for rule in cls.rules]
        return schema


def map_by(key: str) -> dict[str, Any]:
    """Returns the schema of a list whose items are told apart by `key`, so that two owners may each apply their own."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def unique_by(key: str) -> AfterValidator:
    """Returns a validator that refuses a list with two items of the same `key`, as the API server does."""

    def check(items: list[Any]) -> list[Any]:
        keys = [getattr(item, key) for item in items]
        if doubled := next((name for name in keys if keys.count(name) > 1), None):
            raise PydanticCustomError("doubled", "{name} is listed twice", {"name": repr(doubled)})
        return items

    return AfterValidator(check)


def models_in(annotation: Any) -> Iterator[type[ApiModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from models_in(argument)


# An object that Kubernetes defines. The API server checks its fields when the pod is created.
Passthrough = Annotated[Mapping[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]

_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
TOPOLOGY_PATTERN = r"^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}$"
STORAGE_PATTERN = r"^(gs://[a-z0-9][a-z0-9._-]*[a-z0-9]/.+|/.+)$"
CODE_SCHEME = "secret://"
_CODE = rf"^(gs://[a-z0-9][a-z0-9._-]*[a-z0-9]/.+/[^/]+|/.+|{CODE_SCHEME}[a-z0-9]([-a-z0-9.]*[a-z0-9])?)$"
# The same as in a Kubernetes Job: a DNS subdomain, a slash, a path.
_CONTROLLER = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9/\-._~%!$&'()*+,;=:]+$"
_SHA256 = r"^[0-9a-f]{64}$"
# Every quantity that Kubernetes reads, but none below zero, which no pod may ask for.
_QUANTITY = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
ENTRYPOINT_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
IMAGE_PATTERN = r"^[A-Za-z0-9][-A-Za-z0-9._:@+]*(/[-A-Za-z0-9._:@+]+)*$"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")


def _storage(form: str, below: str, end: str = "") -> Callable[[str], str]:
    """Returns what says why a text is not a place in a bucket or on a volume. `below`: what follows the bucket, which
    may have an `end`."""

    def explain(text: str) -> str:
        scheme, _, rest = text.partition("://")
        bucket, _, path = rest.partition("/")
        if not text or re.search(r"[$<>{}]", text):
            return f"{'has a placeholder that nothing replaces' if text else 'is empty'}; give {form}"
        if scheme == "gs" and not _BUCKET.fullmatch(bucket):
            return f"names no bucket: {bucket!r} is not 3 to 63 of a-z, 0-9, '-', '_' and '.'; give {form}"
        if scheme == "gs":
            return f"ends too early: give {below} below the bucket, such as gs://{bucket}/{path or 'digits'}{end}"
        if f"{scheme}://" == CODE_SCHEME:
            return f"names no Secret: {rest!r} is not a name of a-z, 0-9, '-' and '.'"
        if rest:
            return f"is not in Cloud Storage, and {scheme}:// is not read; give {form}"
        near = re.sub("^gs:/*", "", text)
        is_bucket = _BUCKET.fullmatch(near.partition("/")[0]) and "/" in near
        return f"is no absolute path; give {form}" + (f"; did you mean gs://{near}?" if is_bucket else "")

    return explain


def _explain_entrypoint(text: str) -> str:
    if len(words := text.split()) > 1:
        return f"is a command line: it goes to trainer.command, as [{', '.join(words)}]"
    if call := re.fullmatch(r"(.+)\(.*\)", text):
        return f"calls the function, which the trainer does: leave out the brackets, as in {call[1]}"
    module = re.sub(r"\.py$", "", text.partition(":")[0]).replace("/", ".").strip(".")
    near = f"; write {module}:NAME for what is called NAME there" if re.fullmatch(r"[A-Za-z_][\w.]*", module) else ""
    return f"is not of the form module:callable, such as examples.digits:task{near}"


def _explain_image(text: str) -> str:
    near = re.sub(r"^[a-z]+://", "", text.strip())
    written = f"; write {near}" if re.fullmatch(IMAGE_PATTERN, near) else ""
    return f"is not an image such as registry.example/digits:1, with every variable replaced{written}"


def _explain_topology(text: str) -> str:
    near = re.sub(r"[ \[\]]", "", text).lower().replace("*", "x").replace(",", "x").replace("\u00d7", "x")
    written = f"; write {near}" if re.fullmatch(TOPOLOGY_PATTERN, near) else ""
    return f"is not chips along two or three axes, such as 4x4 or 2x2x4{written}"


# What error messages show instead of the pattern: what the text is not, or a sentence about the text.
PATTERN_MEANINGS: dict[str, str | Callable[[str], str]] = {
    _DNS_LABEL: "a name of a-z, 0-9 and '-'",
    TOPOLOGY_PATTERN: _explain_topology,
    STORAGE_PATTERN: _storage("gs://bucket/path or an absolute path such as /mnt/checkpoints/digits", "a folder"),
    _CODE: _storage(
        "gs://bucket/folder/FILE, an absolute path such as /mnt/code/code.tar.gz, or secret://NAME",
        "a folder and a file",
        "/code.tar.gz",
    ),
    _CONTROLLER: "a controller's name after its domain, such as kueue.x-k8s.io/multikueue",
    _SHA256: "a SHA-256: 64 digits of 0-9 and a-f",
    ENTRYPOINT_PATTERN: _explain_entrypoint,
    IMAGE_PATTERN: _explain_image,
}

# Strict, like the API server: "4" and true are not numbers, and "yes" is not a boolean.
Boolean = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
LARGEST_COUNT = 2**53
"""The largest whole number that every JSON reader keeps exactly: a double has 53 bits."""
# Steps and examples outgrow 32 bits on long runs.
LargeCount = Annotated[int, Field(strict=True, ge=1, le=LARGEST_COUNT)]

ControllerName = Annotated[str, Field(max_length=63, pattern=_CONTROLLER)]
DnsLabel = Annotated[str, Field(max_length=63, pattern=_DNS_LABEL)]
Quantity = Annotated[
    Annotated[int, Field(strict=True)] | Annotated[str, Field(pattern=_QUANTITY)], Field(union_mode="left_to_right")
]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
# The limit of a metric's name in a report.
MetricName = Annotated[str, Field(min_length=1, max_length=128)]
LongText = Annotated[str, Field(max_length=4096)]
# A directory or a bucket's path that the trainer writes to.
StorageUri = Annotated[str, Field(max_length=1024, pattern=STORAGE_PATTERN)]
CodeUri = Annotated[str, Field(max_length=1024, pattern=_CODE)]
Sha256 = Annotated[str, Field(max_length=64, pattern=_SHA256)]
