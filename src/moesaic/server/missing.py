"""Endpoints of OpenAI's API, and of other servers, that this server does not have: a 404 that says so.

Question: What answers /v1/embeddings and other endpoints that are not there?
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from moesaic.server.errors import Problem

_ENDPOINTS = {
    "embeddings": ("/v1/embeddings", "/embeddings", "/pooling"),
    "rerank": ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify"),
    "images": ("/v1/images/{rest:path}",),
    "audio": ("/v1/audio/{rest:path}",),
    "video": ("/v1/videos", "/v1/videos/{rest:path}"),
    "moderation": ("/v1/moderations",),
    "fine-tuning": ("/v1/fine_tuning/{rest:path}",),
    "stored files": ("/v1/files", "/v1/files/{rest:path}", "/v1/uploads"),
    "stored batches": ("/v1/batches", "/v1/batches/{rest:path}"),
    "stored responses": ("/v1/responses/{rest:path}",),
    "assistants": ("/v1/assistants", "/v1/threads", "/v1/threads/{rest:path}"),
    "vector stores": ("/v1/vector_stores", "/v1/vector_stores/{rest:path}"),
    "realtime sessions": ("/v1/realtime", "/v1/realtime/{rest:path}"),
}
"""What this server has none of -> paths."""

router = APIRouter(include_in_schema=False)


def _add_endpoint(subject: str, path: str) -> None:
    async def refuse(request: Request) -> None:
        reason = f"this server generates text and has no {subject}"
        raise Problem(404, f"{request.method} {request.url.path}: {reason}", code="unsupported_endpoint")

    router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"])


for _subject, _paths in _ENDPOINTS.items():
    for _path in _paths:
        _add_endpoint(_subject, _path)
