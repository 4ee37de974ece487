"""Routes of a server of several models: its own state, the models, and how they are loaded and unloaded.

The state of a model, and the two calls that change it, have the form of llama.cpp's router.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from moesaic.core.version import __version__
from moesaic.policy.fleet.model_pool import ModelState
from moesaic.server.documentation import errors
from moesaic.server.errors import Problem
from moesaic.server.front.fleet import ModelFleet, ModelRecord
from moesaic.server.front.metrics import write_metrics
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.responses import Health, ModelPermission, Payload, Version

STATES = {
    ModelState.UNLOADED: "unloaded",
    ModelState.MEASURING: "loading",
    ModelState.LOADING: "loading",
    ModelState.LOADED: "loaded",
    ModelState.DRAINING: "loaded",
    ModelState.UNLOADING: "unloading",
}
RUNNING_STATES = ("loading", "loaded")


class ModelStatus(BaseModel):
    """The state of a model."""

    value: Literal["unloaded", "loading", "loaded", "unloading"]
    failed: Literal[True] | None = None
    """Set if the last load failed, or the process ended by itself."""
    exit_code: int | None = None
    """The exit code of the process that failed. Negative: the signal that ended it."""
    error: str | None = None
    """Why it failed."""


class ServedModelCard(Payload):
    """A name by which a model is served, and whether the model is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The model behind the name."""
    parent: None
    aliases: list[str]
    """Further names of the same model."""
    status: ModelStatus
    max_model_len: int | None = None
    """Known once the model has been loaded."""
    permission: list[ModelPermission]


class ServedModelList(Payload):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ServedModelCard]


class ModelCommand(BaseModel):
    """The body of /models/load and /models/unload."""

    model: str


class Success(Payload):
    """The answer of /models/load and /models/unload."""

    success: Literal[True]


router = APIRouter()
models_router = APIRouter(route_class=StrictJsonRoute)


def _get_fleet(request: Request) -> ModelFleet:
    fleet: ModelFleet = request.app.state.fleet
    return fleet


Fleet = Annotated[ModelFleet, Depends(_get_fleet)]


@router.get("/health", responses=errors(503))
@router.get("/ping", responses=errors(503))
async def health(fleet: Fleet) -> Health:
    """200 if requests are answered, also by models that load first. 503 if no model can be loaded."""
    fleet.require_serving()
    return Health(status="ok")


@router.get("/live")
async def live() -> Health:
    """200 while the process runs, also while it cannot serve. One that does not answer should be killed."""
    return Health(status="ok")


@router.get("/version")
async def version() -> Version:
    """moesaic's version."""
    return Version(version=__version__)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(fleet: Fleet) -> Response:
    """The metrics of the models, and those of each loaded model, in Prometheus' text format."""
    return Response(await write_metrics(fleet), headers={"Content-Type": CONTENT_TYPE_LATEST})


@models_router.get("/v1/models", responses=errors(401), response_model_exclude_unset=True)
@models_router.get("/models", responses=errors(401), response_model_exclude_unset=True)
async def list_models(fleet: Fleet, request: Request) -> ServedModelList:
    """Every name of every model, with the state of the model."""
    cards = [_card(fleet, fleet.find(name), name, request) for name in fleet.names]
    return ServedModelList(object="list", data=cards)


@models_router.get(
    "/v1/models/{model_id:path}", responses=errors(401, 404), response_model_exclude_unset=True
)
async def get_model(model_id: str, fleet: Fleet, request: Request) -> ServedModelCard:
    """The model of this name."""
    return _card(fleet, fleet.find(model_id), model_id, request)


@models_router.post("/models/load", responses=errors(400, 401, 404, 503))
async def load_model(body: ModelCommand, fleet: Fleet) -> Success:
    """Load a model when its turn comes. The answer does not wait for that."""
    record = fleet.find(body.model)
    if STATES[fleet.state_of(record)] in RUNNING_STATES:
        raise Problem(400, f"model: {body.model!r} is loaded or loading", param="model")
    fleet.load(record)
    return Success(success=True)


@models_router.post("/models/unload", responses=errors(400, 401, 404, 503))
async def unload_model(body: ModelCommand, fleet: Fleet) -> Success:
    """Unload a model once its running requests have ended. The answer does not wait for that."""
    record = fleet.find(body.model)
    if STATES[fleet.state_of(record)] not in RUNNING_STATES:
        raise Problem(400, f"model: {body.model!r} is not loaded", param="model")
    fleet.unload(record)
    return Success(success=True)


def _card(fleet: ModelFleet, record: ModelRecord, name: str, request: Request) -> ServedModelCard:
    start_time: int = request.app.state.start_time
    # Only fields that are set are sent.
    permission = ModelPermission(id=f"modelperm-{name}", created=start_time).model_dump()
    known_fields: dict[str, Any] = {}
    if "max_model_len" in record.info:
        known_fields["max_model_len"] = record.info["max_model_len"]
    return ServedModelCard(
        id=name,
        object="model",
        created=start_time,
        owned_by="moesaic",
        root=record.model.root,
        parent=None,
        aliases=[alias for alias in record.model.names if alias != name],
        status=_status(fleet, record),
        permission=[ModelPermission.model_validate(permission)],
        **known_fields,
    )


def _status(fleet: ModelFleet, record: ModelRecord) -> ModelStatus:
    fields: dict[str, Any] = {"value": STATES[fleet.state_of(record)]}
    if record.failure and fields["value"] == "unloaded":
        fields |= {"failed": True, "error": record.failure}
        if record.exit_code is not None:
            fields["exit_code"] = record.exit_code
    return ModelStatus.model_validate(fields)
