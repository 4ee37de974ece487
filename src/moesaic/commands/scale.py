"""`moesaic scale`: changes the number of processes of a running server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from moesaic.commands.options import Scale
from moesaic.commands.processes import as_lines
from moesaic.core.errors import ConfigError
from moesaic.server.client import Client


def run(options: Scale, as_json: bool) -> int:
    """Change the number of processes, wait for it, and print the new status. Returns the exit code.

    Raises ApiError if nothing was changed.
    """
    if not _collect_counts(options):
        flags = "--expert-servers, --attention-workers or --prefill-workers"
        raise ConfigError(f"{flags}: give at least one of them")
    status = asyncio.run(_scale(options))
    print(json.dumps(status) if as_json else "\n".join(as_lines(status)))
    return 0


def _collect_counts(options: Scale) -> dict[str, int]:
    """The new numbers that were given."""
    names = ("expert_servers", "attention_workers", "prefill_workers")
    numbers = {name: getattr(options, name) for name in names}
    return {name: number for name, number in numbers.items() if number is not None}


async def _scale(options: Scale) -> Any:
    async with Client(options.base_url, api_key=options.admin_key or options.api_key) as client:
        return (await client.post("/scale_elastic_ep", _collect_counts(options))).require_success()
