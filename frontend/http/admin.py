"""POST /abort_request, /flush_cache and the external corpora."""

import asyncio
import time
import uuid
from array import array

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...engine_core.refusal import Refused, RefusedError
from ..corpus_load import Corpus, corpus_from_file, corpus_from_texts
from ..service import AsyncService
from .body import json_response, read_json
from .errors import HttpError
from .state import ServerState

FLUSH_POLL_S = 0.1
MAX_FLUSH_WAIT_S = 600.0


class AbortBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``rid``: the exact id of a request (all its samples end), or ``abort_all``."""

    rid: str | None = None
    abort_all: bool | None = None


class AddCorpusBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``file_path`` (JSONL on the server, wins) or ``documents``; ``name`` is ``corpus_id``.

    ``tenant`` (also spelled ``cache_salt``): only requests with this cache salt see the corpus.
    """

    corpus_id: str | None = None
    name: str | None = None
    file_path: str | None = None
    documents: list[str] | None = None
    tenant: str | None = None
    cache_salt: str | None = None


class RemoveCorpusBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``corpus_id``, or the same under ``name``."""

    corpus_id: str | None = None
    name: str | None = None


class AddCorpusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``loaded_token_count``: tokens of this corpus, separators included."""

    success: bool
    corpus_id: str
    message: str
    loaded_token_count: int = 0


class RemoveCorpusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the corpus is gone now; an unknown one counts as gone."""

    success: bool
    message: str


class ListCorporaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of each corpus, separators included."""

    success: bool
    corpus_token_counts: dict[str, int]
    message: str


async def abort_request(request: Request) -> Response:
    """End one request, or all of this server's; an unknown id ends nothing."""
    state: ServerState = request.app.state.server
    service = _running_service(state)
    body = await read_json(request, AbortBody, state.max_body_bytes)
    if not body.rid and not body.abort_all:
        raise HttpError(400, "rid: give the id of a request, or abort_all true", param="rid")
    count = service.abort_all() if body.abort_all else service.abort(body.rid or "")
    return json_response({"success": True, "aborted": count})


async def flush_cache(request: Request) -> Response:
    """Empty the caches; with ``?timeout=s`` wait that long for the server to be idle."""
    state: ServerState = request.app.state.server
    service = state.require()
    deadline = time.monotonic() + _timeout(request)
    while True:
        reply = await service.core.flush_cache()
        if reply.refused is None:
            return PlainTextResponse(reply.message or "Cache flushed.\n")
        if time.monotonic() >= deadline:
            return PlainTextResponse(f"{reply.refused}\n", status_code=400)
        await asyncio.sleep(FLUSH_POLL_S)


async def add_external_corpus(request: Request) -> Response:
    """Load a corpus for n-gram drafts from a file of the server or from inline documents."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, AddCorpusBody, state.max_body_bytes)
    name = _one("corpus_id", body.corpus_id, "name", body.name) or uuid.uuid4().hex
    tenant = _one("tenant", body.tenant, "cache_salt", body.cache_salt)
    if state.corpus_loading:
        return _add_failed(name, "loading another corpus is already in progress; wait for it")
    state.corpus_loading = True
    try:
        _refuse_without_ngram(service)
        return await _add(service, state, body, name, tenant)
    except RefusedError as error:
        if error.refused.status >= 500:
            raise
        return _add_failed(name, str(error))
    finally:
        state.corpus_loading = False


async def _add(
    service: AsyncService, state: ServerState, body: AddCorpusBody, name: str, tenant: str | None
) -> Response:
    corpus = await _tokenized(service, state, body)
    documents = [array("i", document).tobytes() for document in corpus.documents]
    reply = await service.core.add_corpus(name, documents, tenant)
    if reply.refused is not None:
        return _add_failed(name, str(reply.refused))
    message = " ".join(part for part in (reply.message, corpus.note) if part)
    answer = AddCorpusAnswer(
        success=True,
        corpus_id=name,
        message=message,
        loaded_token_count=reply.counts.get(name, corpus.token_count),
    )
    return json_response(answer)


async def _tokenized(service: AsyncService, state: ServerState, body: AddCorpusBody) -> Corpus:
    limit = state.corpus_max_tokens
    if body.file_path is not None:
        counts = (await service.core.list_corpora()).counts
        left = max(limit - sum(counts.values()), 0)
        return await asyncio.to_thread(corpus_from_file, body.file_path, service.tokenizer, left)
    if body.documents is None:
        raise RefusedError(Refused("documents", "give file_path or documents"))
    return await asyncio.to_thread(corpus_from_texts, body.documents, service.tokenizer, limit)


async def remove_external_corpus(request: Request) -> Response:
    """Remove a corpus; one that does not exist counts as removed."""
    state: ServerState = request.app.state.server
    service = state.require()
    body = await read_json(request, RemoveCorpusBody, state.max_body_bytes)
    name = _one("corpus_id", body.corpus_id, "name", body.name)
    if not name:
        raise HttpError(400, "corpus_id: is required", param="corpus_id")
    if (reason := _without_ngram(service)) is not None:
        return json_response(RemoveCorpusAnswer(success=False, message=str(reason)), 400)
    reply = await service.core.remove_corpus(name)
    if reply.refused is not None:
        return json_response(RemoveCorpusAnswer(success=False, message=str(reply.refused)), 400)
    return json_response(RemoveCorpusAnswer(success=True, message=reply.message))


async def list_external_corpora(request: Request) -> Response:
    """Token counts of the loaded corpora."""
    service = request.app.state.server.require()
    if (reason := _without_ngram(service)) is not None:
        failed = ListCorporaAnswer(success=False, corpus_token_counts={}, message=str(reason))
        return json_response(failed, 400)
    reply = await service.core.list_corpora()
    return json_response(
        ListCorporaAnswer(
            success=reply.refused is None,
            corpus_token_counts=reply.counts,
            message=str(reply.refused) if reply.refused is not None else reply.message,
        ),
        200 if reply.refused is None else 400,
    )


def _running_service(state: ServerState) -> AsyncService:
    """The service, also while draining: aborting is how a drain can be cut short."""
    if state.phase == "draining" and state.service is not None:
        return state.service
    return state.require()


def _timeout(request: Request) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_FLUSH_WAIT_S:
        raise HttpError(
            400,
            f"timeout: must be between 0 and {MAX_FLUSH_WAIT_S:g} seconds, got {text!r}",
            param="timeout",
        )
    return seconds


def _one(name: str, value: str | None, alias: str, other: str | None) -> str | None:
    """The value of a field that has two names."""
    if value is not None and other is not None and value != other:
        raise HttpError(400, f"{alias}: differs from {name}; give one of the two", param=alias)
    return value if value is not None else other


def _without_ngram(service: AsyncService) -> Refused | None:
    if service.info.drafter == "NGRAM":
        return None
    return Refused(
        "speculative_algorithm",
        "ngram speculation is not enabled; start with --speculative-algorithm NGRAM",
    )


def _refuse_without_ngram(service: AsyncService) -> None:
    if (refused := _without_ngram(service)) is not None:
        raise RefusedError(refused)


def _add_failed(name: str, message: str) -> Response:
    return json_response(AddCorpusAnswer(success=False, corpus_id=name, message=message), 400)
