"""Several named chat templates in one: as in transformers, `tool_use` for requests with tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DEFAULT, WITH_TOOLS = "default", "tool_use"


def joined(listed: Sequence[Any]) -> Any:
    """The template that chooses among `listed`, which are {"name", "template"}. None if neither is there.

    Without `tool_use`, or without `default`, it is the other one. One that is no text is returned as it is.
    """
    named = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    default, tools = named.get(DEFAULT), named.get(WITH_TOOLS)
    if default is None or tools is None:
        return default if tools is None else tools
    if not isinstance(default, str) or not isinstance(tools, str):
        return default if isinstance(tools, str) else tools
    # "+" keeps the white space that Jinja would drop around these tags. It drops a newline at the end.
    first, second = tools.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools is not none +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
