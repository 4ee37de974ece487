"""HTML files that open offline: all of a page is inside of one file, which asks no other host."""

from __future__ import annotations

import json
from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --back: light-dark(#f6f7f9, #0e1114); --surface: light-dark(#fff, #161a1f);
  --line: light-dark(#dde1e7, #2b323b); --text: light-dark(#191d23, #e6e9ee);
  --muted: light-dark(#5a6371, #9aa5b4); --accent: light-dark(#3450c8, #9db0ff); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1320px; padding: 24px; background: var(--back); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; letter-spacing: -0.02em; margin: 0 0 4px; } p { color: var(--muted); margin: 0 0 16px; }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 12px; padding: 16px;
  margin-bottom: 16px; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 960px; height: auto; }
pre { margin: 0; font: 13px/1.5 ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
"""


def document(title: str, description: str, sections: list[str], style: str = "", script: str = "") -> str:
    """A page with a title, a line about it, and sections of HTML.

    style, script: of this page alone. The caller escapes what is in `sections`.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<style>{_STYLE}{style}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(description)}</p>",
        *(f"<section>{section}</section>" for section in sections),
    ]
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body></html>\n"])


def data(value: object) -> str:
    """`value` as JSON that may stand inside of a script element."""
    # "</script>" in a string would end the element.
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
