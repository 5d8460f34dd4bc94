"""How a dict by failure class is written: as a list with a key, since names that the API chooses are no field names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from tpu_training_operator.api.model import map_by

_MOST_CLASSES = 16


@dataclass(frozen=True)
class ListByClass:
    """A dict by failure class; in the object, a list with the key `class`. Items that cannot be read are dropped."""

    field: str
    schema: dict[str, Any]
    read: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(self._write, when_used="json")
        return core_schema.no_info_plain_validator_function(self._read, serialization=writer)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        properties = {
            "class": {"type": "string", "description": "The class of the failures."},
            self.field: {**self.schema, "description": f"The {self.field} of that class."},
        }
        items = {"type": "object", "required": ["class"], "properties": properties}
        return {"type": "array", "items": items, "maxItems": _MOST_CLASSES, **map_by("class")}

    def _read(self, value: object) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        items = value if isinstance(value, list) else []
        raw = {item["class"]: item.get(self.field) for item in items if isinstance(item, dict) and "class" in item}
        parts = {name: self.read(part) for name, part in raw.items() if isinstance(name, str)}
        return {name: part for name, part in parts.items() if part is not None}

    def _write(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"class": name, self.field: part} for name, part in value.items()]
