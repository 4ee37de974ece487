"""GET /v1/models"""

from __future__ import annotations

from fastapi import APIRouter

from moesaic.server.documentation import errors
from moesaic.server.responses import ModelCard, ModelList
from moesaic.server.service import Service, Serving

router = APIRouter()


@router.get("/v1/models", responses=errors(401, 503))
async def list_models(service: Serving) -> ModelList:
    """The served model, once for each of its names."""
    return ModelList(object="list", data=[_card(service, name) for name in service.names])


@router.get("/v1/models/{model_id:path}", responses=errors(401, 404, 503))
async def get_model(model_id: str, service: Serving) -> ModelCard:
    """The served model, if `model_id` is one of its names."""
    card = _card(service, model_id)
    service.require_model(model_id)
    return card


def _card(service: Service, name: str) -> ModelCard:
    info = service.engine.require_serving()
    return ModelCard(
        id=name,
        object="model",
        created=int(service.started),
        owned_by="moesaic",
        max_model_len=info.max_model_len,
    )
