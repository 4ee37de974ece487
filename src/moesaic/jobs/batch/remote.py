"""A server that runs already and answers the lines of a batch, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moesaic.jobs.batch.local import Served
from moesaic.server.client import Client


@asynccontextmanager
async def remote(base_url: str, api_key: str | None) -> AsyncIterator[Served]:
    """The OpenAI-compatible server at `base_url`, asked for its models first.

    Raises ConnectionLost if nothing answers there, and ApiError if the server refuses, as for a wrong key.
    """
    async with Client(base_url, api_key=api_key) as client:
        names = [str(model.get("id")) for model in await client.models()]
    yield Served(Client(base_url, api_key=api_key), f"{base_url} serves {', '.join(names)}")
