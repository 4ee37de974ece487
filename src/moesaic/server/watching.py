"""GET /v1/events: what a page needs to show a server live, as server-sent events.

A stream looks at the server twice a second, and sends the time and the parts that changed. Without a stream
nothing runs.

Question: What does the page's live view read?
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from moesaic.core.errors import MoesaicError
from moesaic.core.metrics import WorkerStats
from moesaic.server.elastic import EVENTS
from moesaic.server.errors import Problem
from moesaic.server.events import NamedEvent, NamedEventStream
from moesaic.server.service import Cluster, Service, Serving

INTERVAL = 0.5
"""Seconds between two looks at the server."""

router = APIRouter()


class _Source:
    """A stream of events has no request to cancel."""

    def close(self) -> None: ...


@router.get(EVENTS, include_in_schema=False)  # clients made from a schema would wait for its end
async def watch(service: Serving) -> Response:
    """Send the server's state as server-sent events, at most two a second, until it shuts down.

    An event `update` has the time and the parts that changed since the one before; the first has all parts.
    The last event is `end`.
    """
    service.engine.require_loaded()
    return NamedEventStream(_updates(service), _Source(), _make_end_event)


async def _updates(service: Service) -> AsyncGenerator[NamedEvent, None]:
    last_parts: dict[str, Any] = {}
    while True:
        try:
            service.engine.require_loaded()
        except MoesaicError as error:
            yield NamedEvent("end", {"reason": str(error)})
            return
        # No part equals `last_parts` itself, the default, so a part that was never sent is new.
        new_parts = {
            name: part
            for name, part in describe_server(service).items()
            if last_parts.get(name, last_parts) != part
        }
        last_parts |= new_parts
        yield NamedEvent("update", {"time": time.time(), **new_parts})
        await asyncio.sleep(INTERVAL)


def describe_server(service: Service) -> dict[str, Any]:
    """The state of the server. Of a single worker the parts of a cluster are null."""
    info, worker = service.engine.require_loaded(), service.engine.engine.stats().worker
    meter = service.engine.meter
    parts: dict[str, Any] = {
        "model": {
            "name": service.model_name,
            "layers": list(info.routed_layers),
            "experts": info.num_experts,
            "top_k": info.top_k,
            "max_model_len": info.max_model_len,
        },
        "engine": _worker(worker)
        | {"prompt_tokens": meter.prompt_tokens, "generation_tokens": meter.generation_tokens},
        "cluster": None,
        "processes": None,
        "load": None,
        "hosts": None,
        "links": None,
    }
    return parts if service.cluster is None else parts | _cluster(service.cluster)


def _cluster(cluster: Cluster) -> dict[str, Any]:
    status, load, workers = cluster.report(), cluster.load(), cluster.worker_stats()
    processes = []
    for process in status.processes:
        fields = asdict(process)
        for name in ("pid", "address", "kernels"):
            del fields[name]
        # Whole seconds, since a part is sent again with every change.
        fields["silent_seconds"] = int(process.silent_seconds)
        fields["worker"] = _worker(workers[process.name]) if process.name in workers else None
        processes.append(fields)
    cluster_fields = {
        "placement_version": status.placement_version,
        "change": status.change,
        "missing": sum(len(layer.missing) for layer in status.replicas),
        "single": sum(len(layer.single) for layer in status.replicas),
        "failures": [asdict(failure) for failure in status.failures],
        "counters": asdict(status.counters),
        "watched": status.watched,
    }
    shares = None if load is None else {"layers": list(load.layers), "pairs": load.pairs.tolist()}
    hosts, links = [asdict(host) for host in status.hosts], [asdict(link) for link in status.links]
    return {"cluster": cluster_fields, "processes": processes, "load": shares, "hosts": hosts, "links": links}


def _worker(stats: WorkerStats) -> dict[str, Any]:
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "blocks": {
            "used": stats.blocks.num_used,
            "cached": stats.blocks.num_cached,
            "total": stats.blocks.num_total,
        },
        "preemptions": stats.preemptions,
    }


def _make_end_event(problem: Problem) -> NamedEvent:
    return NamedEvent("end", {"reason": problem.body.error.message})
