"""GET /health, /ready, /metrics, /server_info, /model_info and /v1/capabilities."""

import contextlib
import time

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ... import __version__
from ...engine_core.capabilities import capability_table
from ...engine_core.drafter_spec import known_drafters
from ...engine_core.messages import CoreStats
from ...engine_core.processor_names import known_processors
from ...engine_core.refusal import RefusedError
from ..metrics import average_accept_length
from ..service import AsyncService
from .body import json_response
from .errors import error_response
from .state import ServerState

FRESH_S = 1.0  # a core heard from this recently needs no probe
PROBE_TIMEOUT_S = 20.0
SCRAPE_TIMEOUT_S = 2.0


async def health(request: Request) -> Response:
    """200 when the server is up and its core answers, else 503 with the reason."""
    state: ServerState = request.app.state.server
    reason = state.unavailable()
    if reason is None and state.service is not None:
        reason = await _probe(state.service)
    return Response(status_code=200) if reason is None else error_response(503, reason)


async def ready(request: Request) -> Response:
    """200 when requests are accepted, else 503; the core is not asked."""
    reason = request.app.state.server.unavailable()
    return Response(status_code=200) if reason is None else error_response(503, reason)


async def metrics(request: Request) -> Response:
    """Prometheus exposition text; a core that does not answer shows its last known values."""
    state: ServerState = request.app.state.server
    service = state.service
    if service is None:
        return PlainTextResponse("", media_type=CONTENT_TYPE_LATEST)
    text = service.metrics.render(await _stats_or_none(service), service.info)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def server_info(request: Request) -> Response:
    """The resolved configuration, what the core is and its counters."""
    state: ServerState = request.app.state.server
    service = state.require()
    stats = await service.core.stats()
    core = msgspec.to_builtins(service.info)
    counters = {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "call"}
    internal = {"avg_spec_accept_length": average_accept_length(stats), **counters}
    return json_response(
        {**state.settings, **core, "version": __version__, "internal_states": [internal]}
    )


async def model_info(request: Request) -> Response:
    """What is served."""
    state: ServerState = request.app.state.server
    service = state.require()
    tokenizer = service.tokenizer
    return json_response(
        {
            "model_path": service.info.model,
            "served_model_name": state.model_name,
            "tokenizer_path": str(tokenizer.folder),
            "is_generation": True,
            "context_length": service.info.context_length,
            "vocab_size": service.info.vocab_size,
            "eos_token_ids": service.info.eos_ids,
            "has_chat_template": tokenizer.chat_template is not None,
            "preferred_sampling_params": state.sampling_defaults,
        }
    )


async def capabilities(request: Request) -> Response:
    """What works, what is refused and why, the drafters that there are, and logits processors."""
    state: ServerState = request.app.state.server
    loaded = () if state.service is None else state.service.info.processors
    return json_response(
        {
            "capabilities": capability_table(),
            "drafters": known_drafters(),
            "logits_processors": {"loaded": loaded, "installed": known_processors()},
        }
    )


async def _probe(service: AsyncService) -> str | None:
    """Why the core counts as unhealthy; a busy core answers after its running step."""
    if time.monotonic() - service.core.last_message < FRESH_S:
        return None
    try:
        await service.core.stats(PROBE_TIMEOUT_S)
    except RefusedError as error:
        return str(error)
    return None


async def _stats_or_none(service: AsyncService) -> CoreStats | None:
    with contextlib.suppress(RefusedError):
        return await service.core.stats(SCRAPE_TIMEOUT_S)
    return None
