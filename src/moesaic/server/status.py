"""Routes that report the server's state and need no key, such as /health and /metrics, and /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from moesaic.server.documentation import errors
from moesaic.server.responses import Health, ModelCard, ModelList, ModelPermission, Version
from moesaic.server.service import Service, Serving

router = APIRouter()
models_router = APIRouter()


@router.get("/health", responses=errors(503))
@router.get("/ping", responses=errors(503))
async def health(service: Serving) -> Health:
    """200 if requests are computed, or will be soon by processes that start. Else 503 with the reason."""
    service.engine.require_serving()
    return Health(status="ok")


@router.get("/live")
async def live() -> Health:
    """200 while the process runs, also while it cannot serve. One that does not answer should be killed."""
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


@models_router.get("/v1/models", responses=errors(401, 503))
async def list_models(service: Serving) -> ModelList:
    """The served model, once for each of its names."""
    return ModelList(object="list", data=[_card(service, name) for name in service.names])


@models_router.get("/v1/models/{model_id:path}", responses=errors(401, 404, 503))
async def get_model(model_id: str, service: Serving) -> ModelCard:
    """The served model, if `model_id` is one of its names."""
    card = _card(service, model_id)
    service.require_model(model_id)
    return card


def _card(service: Service, name: str) -> ModelCard:
    info, start_time = service.engine.require_serving(), int(service.start_time)
    # Only fields that are set are sent.
    permission = ModelPermission(id=f"modelperm-{name}", created=start_time).model_dump()
    return ModelCard(
        id=name,
        object="model",
        created=start_time,
        owned_by="moesaic",
        root=service.model_name,
        parent=None,
        max_model_len=info.max_model_len,
        permission=[ModelPermission.model_validate(permission)],
    )
