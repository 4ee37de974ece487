"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from moesaic.server.adaptors import deliver, translate_fields
from moesaic.server.anthropic.answer import MessageAnswer, MessageWriter, TokenCount
from moesaic.server.anthropic.body import CountRequest, MessagesRequest
from moesaic.server.anthropic.conversation import list_left_out, list_names, make_chat
from moesaic.server.anthropic.errors import AnthropicError
from moesaic.server.chat import open_chat
from moesaic.server.documentation import GENERATION_STATUSES, describe_named_events, errors
from moesaic.server.events import CLIENT_GONE, run_until_disconnect
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.prompts import chat_prompt
from moesaic.server.service import Serving
from moesaic.server.tools import callable_tools

ERRORS = errors(*GENERATION_STATUSES, model=AnthropicError)
router = APIRouter(route_class=StrictJsonRoute)


@router.post(
    "/v1/messages",
    response_model=MessageAnswer,
    responses=ERRORS | describe_named_events("message_stop", "error"),
)
async def create_message(body: MessagesRequest, request: Request, service: Serving) -> Response:
    """Answer a conversation in Anthropic's form."""
    service.fields.check(body, request)
    service.fields.note(list_left_out(body), request)
    with translate_fields(list_names(body)):
        conversation = make_chat(body, service.formats.reasoning is not None)
        chat = await open_chat(conversation, request.receive, service, fit=True)
    if chat is None:
        return Response(status_code=CLIENT_GONE)
    writer = MessageWriter(service.model_name, chat.prompt_tokens)
    return await deliver(writer, chat, bool(body.stream), request.receive)


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ERRORS)
async def count_tokens(body: CountRequest, request: Request, service: Serving) -> Response:
    """The number of tokens of a message's prompt. The engine is not asked."""
    service.engine.require_serving()
    service.require_model(body.model)
    service.fields.check(body, request)
    service.fields.note(list_left_out(body), request)
    with translate_fields(list_names(body)):
        chat = make_chat(body, service.formats.reasoning is not None)
        callable_tools(chat, service.formats)
        prompt = await run_until_disconnect(
            request.receive, chat_prompt(chat.messages, chat, service, any_length=True)
        )
    if prompt is None:
        return Response(status_code=CLIENT_GONE)
    return TokenCount(input_tokens=len(prompt)).response()
