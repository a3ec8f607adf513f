"""The ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from ...engine_core.refusal import RefusedError
from ..service import AsyncService
from .auth import BearerKey
from .endpoints import ENDPOINTS
from .errors import HttpError, on_bug, on_disconnect, on_http_exception, on_refused
from .openapi import docs, openapi_json
from .state import ServerState


def create_app(service: AsyncService | None, state: ServerState) -> Starlette:
    """The application; without a ``service`` it answers 503 until ``state`` gets one.

    A given service makes the server "up". ``state.phase`` may change at any time.
    """
    if service is not None:
        state.service = service
        state.phase = "up"
    routes = [Route(e.path, e.handler, methods=list(e.methods)) for e in ENDPOINTS]
    routes += [Route("/openapi.json", openapi_json), Route("/docs", docs)]
    keys = [Middleware(BearerKey, key=state.api_key)] if state.api_key is not None else []
    app = Starlette(
        routes=routes,
        middleware=keys,
        exception_handlers={
            RefusedError: on_refused,
            HttpError: on_refused,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
    )
    app.state.server = state
    return app
