"""Errors in OpenAI's shape, for every way a request can fail."""

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...engine_core.refusal import Refused, RefusedError

CLIENT_GONE = 499  # nginx's number; nobody is left to read it

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "internal_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
}
_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    415: "unsupported_media_type",
    501: "not_supported",
    503: "service_unavailable",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object; ``param`` names the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every 4xx and 5xx answer. ``object`` and ``message`` repeat it for SGLang's clients."""

    error: ErrorDetail
    object: str = "error"
    message: str = ""


class HttpError(Exception):
    """An error answer with its own code; RefusedError covers the usual ones."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """Build the body of an error answer."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    detail = ErrorDetail(
        message=message, type=kind, param=param, code=code or _CODES.get(status, status)
    )
    return ErrorBody(error=detail, message=message)


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error answer."""
    body = msgspec.json.encode(error_body(status, message, param=param, code=code))
    return Response(body, status, headers, "application/json")


def as_http_error(error: Exception) -> HttpError:
    """The answer that an exception stands for; bugs become a 500 without their details."""
    match error:
        case HttpError():
            return error
        case RefusedError(refused=Refused(status=status, field=field)):
            return HttpError(status, str(error), param=field)
        case _:
            return HttpError(500, "internal error; the server's log has the details")


async def on_refused(request: Request, error: Exception) -> Response:
    """Answer a RefusedError or HttpError."""
    http = as_http_error(error)
    return error_response(http.status, http.message, param=http.param, code=http.code)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer what routing refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no endpoint {request.url.path}; /docs lists them",
        405: f"{request.method} is not allowed on {request.url.path}; see /docs",
    }
    message = messages.get(error.status_code, error.detail)
    return error_response(error.status_code, message, headers=error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """End a request whose client left."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=CLIENT_GONE)


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; the server logs it."""
    return await on_refused(request, error)
