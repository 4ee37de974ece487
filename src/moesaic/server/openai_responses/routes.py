"""POST /v1/responses"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from moesaic.server.adaptors import deliver, translate_fields
from moesaic.server.chat import open_chat
from moesaic.server.documentation import GENERATION_ERRORS, describe_named_events
from moesaic.server.events import CLIENT_GONE
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.openai_responses.answer import ResponseWriter
from moesaic.server.openai_responses.body import ResponsesRequest
from moesaic.server.openai_responses.conversation import NAMES, list_skipped, make_chat
from moesaic.server.openai_responses.objects import ResponseAnswer
from moesaic.server.openai_responses.tools import Toolbox
from moesaic.server.service import Serving

LAST = ("response.completed", "response.incomplete", "response.failed")
router = APIRouter(route_class=StrictJsonRoute)


@router.post(
    "/v1/responses", response_model=ResponseAnswer, responses=GENERATION_ERRORS | describe_named_events(*LAST)
)
async def create_response(body: ResponsesRequest, request: Request, service: Serving) -> Response:
    """Answer a conversation as an OpenAI response. Nothing is stored."""
    service.fields.check(body, request)
    toolbox = Toolbox(body.tools)
    service.fields.note(["store"] if body.store else [], request, may_refuse=False)  # nothing is kept
    service.fields.note([*toolbox.left_out, *list_skipped(body)], request)
    with translate_fields([*toolbox.paths, *NAMES]):
        chat = await open_chat(make_chat(body, toolbox), request.receive, service, fit=True)
    if chat is None:
        return Response(status_code=CLIENT_GONE)
    writer = ResponseWriter(body, toolbox, service.model_name, chat.params, service.now)
    return await deliver(writer, chat, bool(body.stream), request.receive)
