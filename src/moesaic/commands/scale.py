"""`moesaic scale`: changes the number of processes of a running server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from moesaic.client import Client
from moesaic.commands.options import Scale
from moesaic.commands.processes import as_lines
from moesaic.core.errors import ConfigError


def run(options: Scale, as_json: bool) -> int:
    """Change the number of processes, wait for it, and print the new status. Returns the exit code.

    Raises ApiError if nothing was changed.
    """
    if options.expert_servers is None and options.attention_workers is None:
        raise ConfigError("--expert-servers or --attention-workers: give at least one of them")
    status = asyncio.run(_scale(options))
    print(json.dumps(status) if as_json else "\n".join(as_lines(status)))
    return 0


async def _scale(options: Scale) -> Any:
    wanted = {
        "expert_servers": options.expert_servers,
        "attention_workers": options.attention_workers,
    }
    body = {name: number for name, number in wanted.items() if number is not None}
    async with Client(options.base_url, api_key=options.admin_key or options.api_key) as client:
        return (await client.post("/scale_elastic_ep", body)).require_success()
