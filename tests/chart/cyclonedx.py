"""The essentials of CycloneDX 1.6's own schema: what it requires, and the shape of what our documents use.

Its whole schema has 6000 lines; nothing here allows what that refuses.
"""

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_LICENSES = {
    "type": "array",
    "items": {
        "oneOf": [
            {
                "type": "object",
                "required": ["license"],
                "additionalProperties": False,
                "properties": {
                    "license": {
                        "oneOf": [
                            {"required": ["id"], "additionalProperties": False, "properties": {"id": _TEXT}},
                            {"required": ["name"], "additionalProperties": False, "properties": {"name": _TEXT}},
                        ]
                    }
                },
            },
            {"required": ["expression"], "additionalProperties": False, "properties": {"expression": _TEXT}},
        ]
    },
}
_COMPONENT = {
    "type": "object",
    "required": ["type", "name"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": ["application", "library"]},
        "bom-ref": _TEXT,
        "name": _TEXT,
        "version": {"type": "string", "maxLength": 1024},
        "description": {"type": "string"},
        "scope": {"enum": ["required", "optional", "excluded"]},
        "purl": {"type": "string", "pattern": "^pkg:[a-z]+/[a-z0-9.-]+@[A-Za-z0-9.%_-]+$"},
        "licenses": _LICENSES,
        "externalReferences": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["url", "type"],
                "additionalProperties": False,
                "properties": {
                    "url": {"type": "string", "format": "iri-reference"},
                    "type": {"const": "distribution"},
                    "hashes": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["alg", "content"],
                            "additionalProperties": False,
                            "properties": {
                                "alg": {"const": "SHA-256"},
                                "content": {"type": "string", "pattern": "^[a-f0-9]{64}$"},
                            },
                        },
                    },
                },
            },
        },
        "properties": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
            },
        },
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["bomFormat", "specVersion"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"const": "http://cyclonedx.org/schema/bom-1.6.schema.json"},
        "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"},
        "serialNumber": {
            "type": "string",
            "pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        },
        "version": {"type": "integer", "minimum": 1},
        "metadata": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"timestamp": {"type": "string", "format": "date-time"}, "component": _COMPONENT},
        },
        "components": {"type": "array", "uniqueItems": True, "items": _COMPONENT},
        "dependencies": {
            "type": "array",
            "uniqueItems": True,
            "items": {
                "type": "object",
                "required": ["ref"],
                "additionalProperties": False,
                "properties": {"ref": _TEXT, "dependsOn": {"type": "array", "uniqueItems": True, "items": _TEXT}},
            },
        },
    },
}
