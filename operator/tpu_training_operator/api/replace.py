"""Changes fields of frozen values. `dataclasses.replace` calls the constructor, which for a part of the status
validates all its fields again, and a pass changes such parts a hundred times."""

import dataclasses
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

# At most as long as any text or list of the status may be.
_SHORT_TEXT = 64
_SHORT_LIST = 8

if TYPE_CHECKING:
    # So that a misspelt field is a type error.
    from dataclasses import replace as replace
else:

    def replace(value, /, **changes):
        """Returns the dataclass with these changes, as `dataclasses.replace` does. A part of the status is validated
        only if one of them could be invalid in spite of its type."""
        cls = type(value)
        names, is_validated = _fields(cls)
        is_valid = not is_validated or all(map(_is_valid, changes.values()))
        if not is_valid or not changes.keys() <= names.keys():
            return dataclasses.replace(value, **changes)
        new, old = object.__new__(cls), value.__dict__
        # The old values of cached properties stay behind.
        new.__dict__.update({name: old[name] for name in names} | changes)
        return new


@lru_cache(None)
def _fields(cls: type[Any]) -> tuple[dict[str, None], bool]:
    """Returns the names of the fields, none if only the constructor may set them; and whether it validates them."""
    fields = dataclasses.fields(cls)
    is_simple = all(field.init for field in fields) and not {"__post_init__", "__slots__"} & set(dir(cls))
    return dict.fromkeys(field.name for field in fields) if is_simple else {}, hasattr(cls, "__pydantic_validator__")


def _is_valid(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= _SHORT_LIST and all(hasattr(part, "__pydantic_validator__") for part in value)
    if isinstance(value, str) and not isinstance(value, Enum):
        return len(value) <= _SHORT_TEXT and value.isprintable()
    return value is None or isinstance(value, int | Enum) or hasattr(value, "__pydantic_validator__")
