"""`moesaic scale`: changes the number of processes of a running server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from moesaic.commands.options import Scale
from moesaic.commands.processes import as_lines
from moesaic.core.errors import ConfigError
from moesaic.server.client import Client

PATH = "/scale_elastic_ep"


def run(options: Scale, as_json: bool) -> int:
    """Change the number of processes, wait for it, and print the new status. Returns the exit code.

    An interrupt ends only the waiting. The server goes on with the change, unless another call cancels it.

    Raises ApiError if nothing was changed.
    """
    counts = _collect_counts(options)
    if options.cancel and counts:
        flag, value = next(iter(counts.items()))
        raise ConfigError.field("--" + flag.replace("_", "-"), value, "no number with --cancel")
    if not (options.cancel or counts):
        flags = "--expert-servers, --attention-workers, --prefill-workers or --cancel"
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
        if options.cancel:
            return (await client.delete(PATH)).require_success()
        return (await client.post(PATH, _collect_counts(options))).require_success()
