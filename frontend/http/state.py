"""What all endpoints share: the service, the server's phase and its settings."""

import time
from collections.abc import Mapping
from typing import Literal

from ...engine_core.refusal import Refused, RefusedError
from ..service import AsyncService

Phase = Literal["starting", "up", "draining"]
MAX_BODY_BYTES = 32 * 1024 * 1024


class ServerState:
    """Mutable state of one HTTP server.

    ``model_name``: the name of API answers. ``settings``: the resolved configuration that
    /server_info shows. ``sampling_defaults``: the model's generation_config, for the OpenAI
    endpoints. ``corpus_max_tokens``: cap of external corpora. ``cumulative_streams``: native
    streams repeat the whole text in each chunk, as SGLang's do. ``tool_call_parser``: how the
    model writes calls.
    """

    def __init__(
        self,
        model_name: str,
        *,
        settings: Mapping[str, object] | None = None,
        api_key: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        sampling_defaults: Mapping[str, float | int] | None = None,
        corpus_max_tokens: int = 10_000_000,
        cumulative_streams: bool = True,
        tool_call_parser: str | None = None,
    ) -> None:
        self.model_name = model_name
        self.settings = dict(settings or {})
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes
        self.sampling_defaults = dict(sampling_defaults or {})
        self.corpus_max_tokens = corpus_max_tokens
        self.cumulative_streams = cumulative_streams
        self.tool_call_parser = tool_call_parser
        self.corpus_loading = False
        self.created = int(time.time())
        self.phase: Phase = "starting"
        self.service: AsyncService | None = None

    def unavailable(self) -> str | None:
        """Why no request can be served now, or None."""
        if self.service is None or self.phase == "starting":
            return "the server is starting; try again later"
        if self.service.core.dead.is_set():
            return self.service.core.dead_reason
        if self.phase == "draining":
            return "the server is shutting down; send the request to another one"
        return None

    def require(self) -> AsyncService:
        """The service. Raises RefusedError (503) while nothing can be served."""
        reason = self.unavailable()
        if reason is not None or self.service is None:
            raise RefusedError(Refused("server", reason or "not ready", 503))
        return self.service
