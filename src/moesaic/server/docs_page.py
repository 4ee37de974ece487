"""GET /docs: the OpenAPI schema as one HTML page, which needs no other host and no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter()

# The page has no script, so none may run.
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181a1b; } a { color: #8ab4f8; } }
code { font-family: ui-monospace, monospace; font-size: 0.92em; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #8884; }
h3 { margin: 1.6rem 0 0.3rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.7rem 0.2rem 0;
  border-bottom: 1px solid #8883; }
""".strip()

Schema = Mapping[str, Any]


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The API on one page."""
    return HTMLResponse(page(request.app.openapi()), headers=_HEADERS)


def page(schema: Schema) -> str:
    """The HTML of an OpenAPI schema."""
    info = schema["info"]
    title = f"{info['title']} {info['version']}"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            '<p>The same as a schema for programs: <a href="openapi.json">openapi.json</a>.</p>',
            "<h2>Endpoints</h2>",
            *_endpoints(schema["paths"]),
            "<h2>Bodies</h2>",
            *_bodies(schema.get("components", {}).get("schemas", {})),
            "</body></html>",
        ]
    )


def _endpoints(paths: Mapping[str, Mapping[str, Schema]]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
            yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
            body = operation.get("requestBody", {}).get("content", {})
            if body:
                yield f"<p>Body: {_contents(body)}</p>"
            yield "<table><tr><th>status</th><th>answer</th><th></th></tr>"
            for status, answer in operation["responses"].items():
                body, description = (
                    _contents(answer.get("content", {})),
                    escape(answer.get("description", "")),
                )
                yield f"<tr><td>{status}</td><td>{body}</td><td>{description}</td></tr>"
            yield "</table>"


def _contents(contents: Mapping[str, Schema]) -> str:
    """The types of a body in each of its content types."""
    return ", ".join(
        f"{_type(content.get('schema', content.get('itemSchema', {})))} ({escape(kind)})"
        for kind, content in contents.items()
    )


def _bodies(schemas: Mapping[str, Schema]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        required_fields = schema.get("required", ())
        rows = [
            f"<tr><td><code>{escape(field)}</code>{' *' if field in required_fields else ''}</td>"
            f"<td>{_type(field_schema)}</td><td>{escape(field_schema.get('description', ''))}</td></tr>"
            for field, field_schema in schema.get("properties", {}).items()
        ]
        if rows:
            yield "<table><tr><th>field (* needed)</th><th>value</th><th></th></tr>"
            yield from rows
            yield "</table>"


def _type(schema: Schema) -> str:
    """The values that a schema allows, in words and as HTML. Example: "integer (at least 0) or null"."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    members = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if members:
        return " or ".join(dict.fromkeys(map(_type, members)))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    kind = escape(str(schema.get("type", "any value")))
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        kind = f"object of {_type(schema['additionalProperties'])}"
    limits = [escape(text.format(_plain(schema[name]))) for name, text in _LIMITS.items() if name in schema]
    return f"{kind} ({', '.join(limits)})" if limits else kind


def _plain(limit: object) -> object:
    """FastAPI turns the limits of integers into floats: 128.0 becomes 128 again."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
