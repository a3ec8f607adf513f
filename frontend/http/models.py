"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .body import json_response
from .errors import HttpError
from .state import ServerState


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; ``max_model_len``: its context in tokens."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "outrider"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models: one."""

    data: list[ModelCard]
    object: str = "list"


def check_model(name: str | None, state: ServerState) -> None:
    """Refuse a model that is not served; leaving the name out means the served one."""
    if name is not None and name != state.model_name:
        raise HttpError(
            404,
            f"model: {name!r} is not served; use {state.model_name!r} or leave it out",
            param="model",
            code="model_not_found",
        )


async def list_models(request: Request) -> Response:
    """The served model as OpenAI's list."""
    return json_response(ModelList(data=[_card(request.app.state.server)]))


async def get_model(request: Request) -> Response:
    """The served model by its name."""
    state: ServerState = request.app.state.server
    check_model(request.path_params["model"], state)
    return json_response(_card(state))


def _card(state: ServerState) -> ModelCard:
    info = state.service.info if state.service is not None else None
    return ModelCard(
        id=state.model_name,
        created=state.created,
        root=info.model if info is not None else state.model_name,
        max_model_len=info.context_length if info is not None else None,
    )
