"""The HTTP server: OpenAI-compatible and native endpoints over the shared service."""

from .app import create_app
from .server import serve_http
from .state import ServerState

__all__ = ["ServerState", "create_app", "serve_http"]
