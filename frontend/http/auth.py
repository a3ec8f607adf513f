"""The Bearer key, checked before anything else is read."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_response

OPEN_PATHS = ("/health", "/metrics")


class BearerKey:
    """ASGI middleware: every path but health and metrics needs ``Authorization: Bearer <key>``."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(scope):
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            401,
            "authorization: wrong or missing API key; send Authorization: Bearer <key>",
            param="authorization",
            headers={"www-authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = f"{scheme.lower()} {key.strip()}".encode()
        return hmac.compare_digest(given, self._expected)
