"""Routes that report the state of the cluster's processes and change their number."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from fastapi import APIRouter, Depends

from moesaic.core.cluster_status import ClusterStatus, KilledStatus
from moesaic.core.errors import ConfigError
from moesaic.server.documentation import bearer, errors
from moesaic.server.errors import Problem
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.requests import KillRequest, ScaleRequest
from moesaic.server.service import Cluster, Service, Serving

POLL_SECONDS = 0.5
"""Seconds between two checks whether the server still serves while a change runs."""

STATUS = "/v1/fault_tolerance/status"
SCALE = "/scale_elastic_ep"
KILL = "/v1/fault_tolerance/kill"
EVENTS = "/v1/events"

router = APIRouter(route_class=StrictJsonRoute)


def admin_paths(protect_status: bool) -> frozenset[str]:
    """The paths that always need the admin key. protect_status: so do those that tell about the processes."""
    return frozenset({SCALE, KILL, STATUS, EVENTS} if protect_status else {SCALE, KILL})


@router.get(STATUS, responses=errors(401, 403, 404))
async def status(service: Serving) -> ClusterStatus:
    """Report every process, the experts of each server, the copies of each expert, and all failures."""
    return _cluster(service).report()


@router.post(SCALE, responses=errors(400, 401, 403, 404, 408, 409, 413, 503), dependencies=[Depends(bearer)])
async def scale(body: ScaleRequest, service: Serving) -> ClusterStatus:
    """Change the number of expert servers, attention workers or prefill workers.

    The answer comes once the change is done. Requests are served meanwhile. If the change fails, the cluster
    stays as it was. If the server shuts down before the change is done, the answer is a 503. A newer call
    takes over, and this one is answered with a 409. A client that goes away changes nothing: see DELETE.
    """
    cluster = _cluster(service)
    numbers = body.expert_servers, body.attention_workers, body.prefill_workers
    if numbers == (None, None, None):
        raise Problem(400, "the body: expert_servers, attention_workers or prefill_workers is needed")
    service.engine.require_loaded()
    await _wait_for(cluster.scale(*numbers), service)
    return cluster.report()


@router.delete(SCALE, responses=errors(401, 403, 404, 409, 503), dependencies=[Depends(bearer)])
async def cancel_scaling(service: Serving) -> ClusterStatus:
    """End the change of a scaling call that is under way. The answer comes once what it did is undone."""
    cluster = _cluster(service)
    service.engine.require_loaded()
    await _wait_for(cluster.cancel_scaling(), service)
    return cluster.report()


async def _wait_for(change: Future[None], service: Service) -> None:
    """Wait for the end of a change, or of the server: a change may take minutes. Raises Problem."""
    waiter = asyncio.wrap_future(change)
    try:
        while not (await asyncio.wait([waiter], timeout=POLL_SECONDS))[0]:
            service.engine.require_loaded()
        waiter.result()
    except ConfigError as error:
        raise Problem(400, str(error)) from error
    finally:
        waiter.cancel()  # it ends only the waiting; the change itself goes on


@router.post(KILL, responses=errors(400, 401, 403, 404, 408, 409, 413, 503), dependencies=[Depends(bearer)])
async def kill(body: KillRequest, service: Serving) -> KilledStatus:
    """Kill one process with SIGKILL, to see that requests go on. It is restarted as after any death.

    Of a process that joined from another host, the connection is closed. It then joins again as a new one.
    `killed` says what was done.
    """
    cluster = _cluster(service)
    service.engine.require_loaded()
    try:
        outcome = cluster.kill(body.name)
    except ConfigError as error:
        raise Problem(400, str(error)) from error
    return KilledStatus(**vars(cluster.report()), killed=outcome)


def _cluster(service: Service) -> Cluster:
    """The cluster. Raises Problem if there is none."""
    if service.cluster is None:
        raise Problem(
            404,
            "this server has one process; see moesaic serve --attention-workers and --expert-servers",
            code="no_cluster",
        )
    return service.cluster
