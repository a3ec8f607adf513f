"""POST /tokenize and /detokenize."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .body import json_response, read_json
from .errors import HttpError
from .models import check_model
from .state import ServerState


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``prompt`` (or ``text``): what is tokenized, special tokens around it by default."""

    prompt: str | None = None
    text: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``tokens``: ids; special tokens are shown unless ``skip_special_tokens``."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text, under SGLang's name and under vLLM's."""

    text: str
    prompt: str


async def tokenize(request: Request) -> Response:
    """Token ids of a text."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, TokenizeBody, state.max_body_bytes)
    check_model(body.model, state)
    text = body.prompt if body.prompt is not None else body.text
    if text is None or (body.prompt is not None and body.text is not None):
        raise HttpError(400, "prompt: give exactly one of prompt and text", param="prompt")
    ids = await service.tokens_of(text, body.add_special_tokens is not False)
    return json_response(
        TokenizeAnswer(tokens=ids, count=len(ids), max_model_len=service.info.context_length)
    )


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, DetokenizeBody, state.max_body_bytes)
    check_model(body.model, state)
    if not service.tokenizer.has_text:
        raise HttpError(501, "tokens: --skip-tokenizer-init left the tokenizer out", param="tokens")
    for token in body.tokens:
        if not 0 <= token < service.info.vocab_size:
            raise HttpError(
                400,
                f"tokens: {token} is outside the vocabulary of {service.info.vocab_size} tokens",
                param="tokens",
            )
    text = service.tokenizer.decode(body.tokens, body.skip_special_tokens is True)
    return json_response(DetokenizeAnswer(text=text, prompt=text))
