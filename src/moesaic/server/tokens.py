"""POST /tokenize and /detokenize"""

from __future__ import annotations

from fastapi import APIRouter, Request

from moesaic.core.errors import RequestError
from moesaic.server.documentation import GENERATION_ERRORS, errors
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.prompts import chat_prompt, off_loop, require_length
from moesaic.server.requests import DetokenizeRequest, TokenizeRequest
from moesaic.server.responses import Detokenized, Tokenized, TokenizerInfo
from moesaic.server.service import Service, Serving

router = APIRouter(responses=GENERATION_ERRORS, route_class=StrictJsonRoute)
info_router = APIRouter(responses=errors(401, 403, 503))

_FILES = ("vocab_file", "merges_file")
"""Settings that name files of the machine, which nobody else needs to know."""


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: Serving) -> Tokenized:
    """The token ids of a text or of a conversation."""
    info = service.engine.require_serving()
    service.require_model(body.model)
    service.fields.check(body, request)
    tokenizer = service.tokenizer
    tokens = await _tokens(body, service)
    names = None
    if body.return_token_strs:
        names = await off_loop(len(tokens), lambda: [tokenizer.token(token) for token in tokens], service)
    return Tokenized(count=len(tokens), max_model_len=info.max_model_len, tokens=tokens, token_strs=names)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: Serving) -> Detokenized:
    """The text of token ids, special tokens included."""
    service.engine.require_serving()
    service.require_model(body.model)
    service.fields.check(body, request)
    tokenizer, tokens = service.tokenizer, body.tokens
    bad = next((token for token in tokens if token >= tokenizer.vocab_size), None)
    if bad is not None:
        choices = f"0 to {tokenizer.vocab_size - 1}"
        raise RequestError(f"tokens: got token id {bad}; allowed: {choices}", "tokens")
    return Detokenized(prompt=await off_loop(len(tokens), lambda: tokenizer.decode(tokens, False), service))


@info_router.get("/tokenizer_info")
async def tokenizer_info(service: Serving) -> TokenizerInfo:
    """The checkpoint's tokenizer_config.json, with the chat template that is used."""
    service.engine.require_serving()
    tokenizer = service.tokenizer
    settings = {name: value for name, value in tokenizer.settings.items() if name not in _FILES}
    # A checkpoint may leave the class out, and the answer has one always.
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    if tokenizer.chat_template is not None:
        info["chat_template"] = tokenizer.chat_template
    return TokenizerInfo.model_validate(info)


async def _tokens(body: TokenizeRequest, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: give either prompt or messages", "prompt")
    if body.messages is not None:
        special = body.add_special_tokens is True
        return await chat_prompt(body.messages, body, service, any_length=True, special=special)
    tokenizer, text, special = service.tokenizer, body.prompt or "", body.add_special_tokens is not False
    require_length(len(text), service, "prompt")
    return await off_loop(len(text), lambda: tokenizer.encode(text, special), service)
