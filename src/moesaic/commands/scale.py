"""`moesaic scale`: asks a running server for another number of processes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from moesaic.client import Client
from moesaic.commands.options import Scale
from moesaic.commands.processes import as_lines
from moesaic.core.errors import ConfigError


def run(options: Scale, as_json: bool) -> int:
    """Returns once that is so; prints who serves what then. Raises ApiError when nothing was changed."""
    if options.expert_servers is None and options.attention_workers is None:
        raise ConfigError("--expert-servers or --attention-workers: say how many there shall be")
    status = asyncio.run(_scale(options))
    print(json.dumps(status) if as_json else "\n".join(as_lines(status)))
    return 0


async def _scale(options: Scale) -> Any:
    wanted = {
        "expert_servers": options.expert_servers,
        "attention_workers": options.attention_workers,
    }
    body = {name: number for name, number in wanted.items() if number is not None}
    async with Client(options.base_url, api_key=options.api_key) as client:
        return (await client.post("/scale_elastic_ep", body)).require_success()
