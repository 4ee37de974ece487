"""Routes that report the server's state and need no key: /health, /ping, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from moesaic.server.documentation import errors
from moesaic.server.responses import Health, Version
from moesaic.server.service import Serving

router = APIRouter()


@router.get("/health", responses=errors(503))
@router.get("/ping", responses=errors(503))
async def health(service: Serving) -> Health:
    """200 if requests are served, else 503 with the reason."""
    service.engine.require_serving()
    return Health(status="ok")


@router.get("/version")
async def version(service: Serving) -> Version:
    """moesaic's version."""
    return Version(version=service.version)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """The metrics in Prometheus' text format."""
    return Response(
        generate_latest(request.app.state.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )
