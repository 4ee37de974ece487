"""The ASGI application of a server of several models.

It answers for the server, and passes everything else on to the process of the model that a request names.
"""

from __future__ import annotations

import time

from fastapi import Depends
from starlette.types import ASGIApp

from moesaic.config import CorsConfig
from moesaic.core.version import __version__
from moesaic.server import docs_page, missing, web_page
from moesaic.server.app import MODEL_MODULES, HeadAsGet
from moesaic.server.cors import Cors
from moesaic.server.documentation import Api, bearer
from moesaic.server.errors import install_handlers
from moesaic.server.front import status
from moesaic.server.front.fleet import ModelFleet
from moesaic.server.front.forwarding import Forwarding
from moesaic.server.guard import BODY_SECONDS, MAX_BODY_BYTES, Access, Guard
from moesaic.server.tokens import info_router


def create_front(
    fleet: ModelFleet,
    *,
    access: Access = Access(),
    max_body_bytes: int = MAX_BODY_BYTES,
    body_seconds: float = BODY_SECONDS,
    cors: CorsConfig = CorsConfig(),
    tokenizer_info: bool = False,
) -> ASGIApp:
    """The API of `fleet`. The caller starts it before it serves the API. See `server.app.create_app`."""
    app = Api(title="moesaic", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.fleet = fleet
    app.state.start_time = int(time.time())
    key_needed = [] if access.api_key is None else [Depends(bearer)]
    model_routers = [module.router for module in MODEL_MODULES]
    if tokenizer_info:
        model_routers.append(info_router)
    # The routes of models are never called here. They describe the API, and refuse wrong methods.
    for router in (*model_routers, missing.router, status.models_router):
        app.include_router(router, dependencies=key_needed)
    for router in (status.router, docs_page.router, web_page.router):
        app.include_router(router)
    install_handlers(app)
    app.add_middleware(Forwarding, fleet=fleet, routes=[route for r in model_routers for route in r.routes])
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, access=access, max_body_bytes=max_body_bytes, body_seconds=body_seconds)
    app.add_middleware(Cors, config=cors)  # the last one is the first that sees a request
    return app
