"""The ASGI application.

Question: Which endpoints are there, and how is one added?
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Depends
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.config import CorsConfig
from moesaic.server import chat, completions, docs_page, elastic, missing, status, tokens, watching, web_page
from moesaic.server.anthropic import routes as anthropic
from moesaic.server.cluster_metrics import ClusterCollector
from moesaic.server.cors import Cors
from moesaic.server.documentation import Api, bearer
from moesaic.server.errors import install_handlers
from moesaic.server.guard import BODY_SECONDS, MAX_BODY_BYTES, Access, Guard
from moesaic.server.metrics import OWN_PREFIX, EngineCollector, make_registry
from moesaic.server.openai_responses import routes as openai_responses
from moesaic.server.request_trace import RequestTrace, Tracing
from moesaic.server.service import Service

MODEL_MODULES = (completions, chat, openai_responses, anthropic, tokens, elastic, watching)
"""The modules whose routes one model answers. A server of several models passes their requests on."""


class HeadAsGet:
    """Answers HEAD wherever GET is answered: passes it on as GET, and sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_headers)


def create_app(
    service: Service,
    *,
    access: Access = Access(),
    max_body_bytes: int = MAX_BODY_BYTES,
    body_seconds: float = BODY_SECONDS,
    cors: CorsConfig = CorsConfig(),
    tokenizer_info: bool = False,
    metrics_prefix: str = OWN_PREFIX,
    on_trace: Callable[[RequestTrace], None] | None = None,
) -> Api:
    """The API of `service`. The caller must start `service.engine` before it serves the API.

    tokenizer_info: answer /tokenizer_info, which shows the chat template. metrics_prefix: that of the metrics
    that vLLM has, too. on_trace: called with the trace of each request for an answer, once it has ended.
    """
    app = Api(
        title="moesaic",
        version=service.version,
        docs_url=None,  # FastAPI's pages load scripts from another host; `docs_page` does not
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    engine = service.engine
    collector = EngineCollector(engine.engine.stats, engine.meter, service.model_name, metrics_prefix)
    app.state.registry = make_registry(collector)
    if service.cluster is not None:
        app.state.registry.register(ClusterCollector(service.cluster, service.model_name))
    key_needed = [] if access.api_key is None else [Depends(bearer)]
    routers = [*(module.router for module in MODEL_MODULES), missing.router, status.models_router]
    for router in [*routers, tokens.info_router] if tokenizer_info else routers:
        app.include_router(router, dependencies=key_needed)
    app.include_router(status.router)
    app.include_router(docs_page.router)
    app.include_router(web_page.router)
    install_handlers(app)
    app.add_middleware(HeadAsGet)
    if on_trace is not None:
        app.add_middleware(Tracing, write=on_trace)
    app.add_middleware(Guard, access=access, max_body_bytes=max_body_bytes, body_seconds=body_seconds)
    app.add_middleware(Cors, config=cors)  # the last one is the first that sees a request
    return app
