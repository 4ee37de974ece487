"""`moesaic top`: a live view of a running server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moesaic.commands.client_options import Top
from moesaic.commands.top_view import Sample, View, compare_samples, draw, read_metrics
from moesaic.core.errors import ConnectionLost
from moesaic.server.client import ApiError, Client

STATUS = "/v1/fault_tolerance/status"
SECONDS = 10.0
"""Seconds after which a server that does not answer counts as gone."""


def run(options: Top, as_json: bool) -> int:
    """Show views until Ctrl-C, or one of them. Returns the exit code."""
    asyncio.run(_show(options, as_json))
    return 0


async def _show(options: Top, as_json: bool) -> None:
    console = Console()
    live = Live(console=console, auto_refresh=False, screen=True)
    drawing = console.is_terminal and not (as_json or options.once)
    async with Client(options.url, api_key=options.api_key, timeout=SECONDS) as client:
        with live if drawing else nullcontext():
            async for snapshot in _views(client, options):
                if drawing:
                    text = (
                        Text(snapshot, style="red")
                        if isinstance(snapshot, str)
                        else draw(snapshot, console.width)
                    )
                    live.update(text, refresh=True)
                elif isinstance(snapshot, str):
                    print(f"moesaic: {snapshot}", file=sys.stderr, flush=True)
                elif as_json:
                    print(json.dumps(asdict(snapshot)), flush=True)
                else:
                    console.print(draw(snapshot, console.width))
                if options.once:
                    return


async def _views(client: Client, options: Top) -> AsyncIterator[View | str]:
    """A view after each interval, or one line while the server cannot be reached.

    Raises ConnectionLost if it cannot be reached the first time, and with --once.
    """
    previous: Sample | None = await _sample(client)
    while True:
        await asyncio.sleep(options.interval)
        try:
            current = await _sample(client)
        except ConnectionLost as error:
            if options.once:
                raise
            # A server that was started anew counts from zero.
            previous = None
            yield f"{error}; trying again every {options.interval:g} s"
            continue
        if previous is not None:
            yield compare_samples(client.base_url, previous, current)
        previous = current


async def _sample(client: Client) -> Sample:
    metrics, status = await asyncio.gather(client.get("/metrics"), client.get(STATUS))
    text = metrics.require_success()
    if not isinstance(text, str):
        raise ApiError(metrics.status, f"{client.base_url}/metrics: no metrics in Prometheus' text format")
    # A wrong key is an error. Any other failure means that the server has no status to show.
    if status.status in (401, 403):
        status.require_success()
    cluster_status = status.body if status.status == 200 and isinstance(status.body, dict) else None
    return Sample(time.monotonic(), read_metrics(text), cluster_status)
