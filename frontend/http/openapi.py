"""GET /openapi.json and /docs, both generated from the endpoints' schemas."""

import html

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ... import __version__
from .body import json_response
from .endpoints import ENDPOINTS, Endpoint
from .errors import ErrorBody

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{border-top:1px solid #ccc;padding-top:1rem}code{background:#f3f3f3;padding:.1em .3em}"
    "td,th{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top}"
)


def openapi_document() -> dict[str, object]:
    """The OpenAPI 3.1 description of the server."""
    kinds: list[type] = [ErrorBody]
    for endpoint in ENDPOINTS:
        kinds += [kind for kind in (endpoint.body, endpoint.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, schema_hook=_any_value, ref_template="#/components/schemas/{name}"
    )
    references = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for endpoint in ENDPOINTS:
        operations = {m.lower(): _operation(endpoint, references) for m in endpoint.methods}
        paths[endpoint.path.replace(":path", "")] = dict(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _any_value(kind: type) -> dict[str, object]:
    """The schema of ``object``: members of an object that is passed on as it is."""
    if kind is object:
        return {"description": "any JSON value"}  # msgspec takes {} for no answer
    raise NotImplementedError  # msgspec's protocol for a type that the hook does not know


def _operation(endpoint: Endpoint, references: dict[type, dict[str, object]]) -> dict[str, object]:
    def content(kind: type | None) -> dict[str, object]:
        return {"application/json": {"schema": references[kind]}} if kind is not None else {}

    summary = (endpoint.handler.__doc__ or "").strip()
    operation: dict[str, object] = {
        "summary": summary,
        "operationId": getattr(endpoint.handler, "__name__", endpoint.path),
        "responses": {
            "200": {"description": "success", "content": content(endpoint.answer)},
            "default": {"description": "an error", "content": content(ErrorBody)},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": content(endpoint.body)}
    if "{" in endpoint.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


async def openapi_json(request: Request) -> Response:
    """The OpenAPI description as JSON."""
    return json_response(openapi_document())


async def docs(request: Request) -> Response:
    """The endpoints as one page without scripts or outside resources."""
    sections = "".join(map(_section, ENDPOINTS))
    return HTMLResponse(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Outrider API</title>"
        f"<style>{_STYLE}</style><h1>Outrider {__version__}</h1>"
        f"<p>Machine-readable: <a href=openapi.json>openapi.json</a>. Errors have the shape "
        f"<code>{{&quot;error&quot;: {{message, type, param, code}}}}</code>.</p>{sections}</html>"
    )


def _section(endpoint: Endpoint) -> str:
    title = html.escape(f"{' | '.join(endpoint.methods)} {endpoint.path}")
    text = html.escape((endpoint.handler.__doc__ or "").strip())
    body = _table(endpoint.body, "Body") + _table(endpoint.answer, "Answer")
    return f"<h2><code>{title}</code></h2><p>{text}</p>{body}"


def _table(kind: type | None, title: str) -> str:
    if kind is None:
        return ""
    rows = "".join(
        f"<tr><td><code>{html.escape(field.encode_name)}</code></td>"
        f"<td>{html.escape(_type_name(field.type))}</td>"
        f"<td>{'required' if field.required else ''}</td></tr>"
        for field in msgspec.structs.fields(kind)
    )
    note = html.escape((kind.__doc__ or "").strip())
    return f"<h3>{title}</h3><p>{note}</p><table>{rows}</table>"


def _type_name(kind: object) -> str:
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    words = text.replace("typing.", "").replace("msgspec._core.", "").split("outrider.frontend.")
    return words[0] + "".join(word.partition(".")[2].rpartition("http.")[2] for word in words[1:])
