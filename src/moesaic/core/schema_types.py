"""Names of types in the schemas of tools."""

from __future__ import annotations

from collections.abc import Mapping

TYPE_ALIASES: Mapping[str, str | None] = {
    "float": "number",
    "double": "number",
    "int": "integer",
    "long": "integer",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "str": "string",
    "any": None,
}
"""Names of types that tools use in place of JSON Schema's. None: any type."""
