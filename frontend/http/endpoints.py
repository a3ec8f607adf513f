"""The table of endpoints: what is served, and what /docs says about it."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from . import admin, chat, chat_answers, completions, health, models, native, tokens

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(msgspec.Struct, frozen=True):
    """One path. ``body`` and ``answer``: their schemas; None where there is no JSON."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    body: type | None = None
    answer: type | None = None


_GET = ("GET",)
_POST = ("POST",)

ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        _POST,
        completions.completions,
        completions.CompletionRequest,
        completions.Completion,
    ),
    Endpoint(
        "/v1/chat/completions",
        _POST,
        chat.chat_completions,
        chat.ChatRequest,
        chat_answers.ChatCompletion,
    ),
    Endpoint("/v1/models", _GET, models.list_models, None, models.ModelList),
    Endpoint("/v1/models/{model:path}", _GET, models.get_model, None, models.ModelCard),
    Endpoint("/generate", _POST, native.generate, native.NativeRequest),
    Endpoint("/health", _GET, health.health),
    Endpoint("/ready", _GET, health.ready),
    Endpoint("/metrics", _GET, health.metrics),
    Endpoint("/server_info", _GET, health.server_info),
    Endpoint("/get_server_info", _GET, health.server_info),
    Endpoint("/model_info", _GET, health.model_info),
    Endpoint("/get_model_info", _GET, health.model_info),
    Endpoint("/v1/capabilities", _GET, health.capabilities),
    Endpoint("/abort_request", _POST, admin.abort_request, admin.AbortBody),
    Endpoint("/flush_cache", ("GET", "POST"), admin.flush_cache),
    Endpoint(
        "/add_external_corpus",
        _POST,
        admin.add_external_corpus,
        admin.AddCorpusBody,
        admin.AddCorpusAnswer,
    ),
    Endpoint(
        "/remove_external_corpus",
        _POST,
        admin.remove_external_corpus,
        admin.RemoveCorpusBody,
        admin.RemoveCorpusAnswer,
    ),
    Endpoint(
        "/list_external_corpora", _GET, admin.list_external_corpora, None, admin.ListCorporaAnswer
    ),
    Endpoint("/tokenize", _POST, tokens.tokenize, tokens.TokenizeBody, tokens.TokenizeAnswer),
    Endpoint(
        "/detokenize", _POST, tokens.detokenize, tokens.DetokenizeBody, tokens.DetokenizeAnswer
    ),
)
