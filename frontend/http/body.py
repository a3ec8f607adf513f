"""JSON bodies: size, content type, strict types, and unknown fields refused by name."""

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine_core.capabilities import misplaced_field, refuse_field, without_neutral
from ...engine_core.refusal import Refused, RefusedError
from ..errors import refused_by
from .errors import HttpError
from .sampling import NativeSampling

T = TypeVar("T")

# A null in another object means something: {"const": null} is a JSON Schema.
_OPTIONS = ("sampling_params", "stream_options", "structured_outputs", "response_format")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


async def read_json(request: Request, kind: type[T], limit: int) -> T:
    """Read and check a body of at most ``limit`` bytes.

    Raises HttpError: 413 too large, 415 not JSON by its content type, 400 malformed, wrong type,
    missing or unknown field; RefusedError for a known field that is not supported.
    """
    content_type = request.headers.get("content-type", "application/json")
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise HttpError(
            415,
            f"content-type {media!r} is not supported; send JSON with application/json",
            param="content-type",
        )
    return decode_json(await _read(request, limit), kind)


async def _read(request: Request, limit: int) -> bytes:
    too_large = HttpError(413, f"the body exceeds {limit} bytes; send less", param="body")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode one JSON object strictly; null stands for an absent field."""
    if not body.strip():
        raise HttpError(400, "the body is empty; send a JSON object", param="body")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise _bad_value(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None
    # The decoder stopped at an unknown field: the rest of the body may still be damaged.
    try:
        return msgspec.convert(_without_defaults(msgspec.json.decode(body)), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _bad_value(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


def _not_json(error: Exception) -> HttpError:
    return HttpError(400, f"the body is not valid JSON: {error}", param="body")


def _without_defaults(value: object) -> object:
    """Drop what asks for nothing: nulls, and unsupported fields left at their neutral value."""
    if not isinstance(value, dict):
        return value
    kept = without_neutral(_without_nulls(value))
    sampling = kept.get("sampling_params")
    if isinstance(sampling, list):
        kept["sampling_params"] = [_without_defaults(item) for item in sampling]
    elif isinstance(sampling, dict):
        kept["sampling_params"] = _without_defaults(sampling)
    return kept


def _without_nulls(fields: dict[str, object]) -> dict[str, object]:
    """``fields`` without nulls; of the objects among them only those that hold options."""
    return {
        name: _without_nulls(value) if name in _OPTIONS and isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def _bad_value(error: msgspec.ValidationError, kind: type) -> HttpError | RefusedError:
    """What a validation error says, naming the field."""
    found = refused_by(error, "")
    path, message = found.field, found.reason
    if (unknown := _UNKNOWN.match(message)) is not None:
        return _unknown_field(path, unknown["name"], kind)
    if (missing := _MISSING.match(message)) is not None:
        name = f"{path}.{missing['name']}".lstrip(".")
        return HttpError(400, f"{name}: is required", param=name)
    name = path or "body"
    return HttpError(400, f"{name}: {message}", param=name)


def _unknown_field(path: str, name: str, kind: type) -> RefusedError:
    refused = refuse_field(name)
    reason = misplaced_field(name, _places(path, kind)) or refused.reason
    return RefusedError(Refused(f"{path}.{name}".lstrip("."), reason, refused.status))


def _places(path: str, kind: type) -> list[tuple[str, tuple[str, ...]]]:
    """Where a request of this kind takes fields: the object at ``path`` first."""
    own: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    places = [("", own)]
    if "sampling_params" in own:
        places.append(("sampling_params.", NativeSampling.__struct_fields__))
    return places[::-1] if path.startswith("sampling_params") else places


def json_response(value: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
