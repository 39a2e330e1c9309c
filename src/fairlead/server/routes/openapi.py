"""`GET /openapi.json`: every route, with the types of its requests and responses.

The views decode bodies with the same types, and writers make responses of them.
"""

import inspect
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from fairlead.base.formats.multipart import FORM
from fairlead.base.version import VERSION
from fairlead.dialects import unserved
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.route import EVENTS, JSON, KEYLESS, Route

COMPONENTS = "#/components/schemas/{name}"

_FIELD = re.compile(r"(\w+): (\S.*)")  # in a docstring; further lines of its text are indented

# The descriptions of errors, by status.
ERRORS = {
    400: "The request is invalid; `param` names the field. `context_length_exceeded`: too long a prompt.",
    401: "There is no API key, or it is unknown.",
    403: "The API key does not allow this, or a page of another server sent the request.",
    404: "There is no such model, route, request or node.",
    408: "The request ran longer than `requestTimeout`, or its body took too long to arrive.",
    409: "The model was unloaded while the request waited for it, or the request does not load it.",
    413: "The body is too large.",
    415: "The body's `Content-Encoding` is not known; `Accept-Encoding` of the response names those to use.",
    429: "The queue or a limit is full. Try again after `Retry-After` seconds.",
    500: "The server failed.",
    501: "This server does not have the route.",
    502: "The node failed, or the model cannot be loaded.",
    503: "No node is available now.",
    504: "The request waited longer than `queue.timeout`.",
}


class OpenApi:
    """The view of `/openapi.json`."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._encoded = lru_cache(1)(self._encode)

    async def document(self, request: Request) -> Response:
        """Return the document, in JSON. Below a prefix it names the prefix, which its paths do not have."""
        return json_response(self._encoded(request.prefix))

    def _encode(self, prefix: str) -> bytes:
        servers = {"servers": [{"url": prefix}]} if prefix else {}
        return msgspec.json.encode(document(self._routes) | servers)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes that are documented."""
    documented = [route for route in routes if route.tag is not None]
    used = [kind for route in documented for kind in (route.body, route.answer, route.error)]
    types = [kind for kind in used if kind not in (None, Any)]
    schemas, components = msgspec.json.schema_components(types, ref_template=COMPONENTS)
    structs: dict[str, type[msgspec.Struct]] = {}
    for kind in msgspec.inspect.multi_type_info(types):
        _find_structs(kind, structs)
    for name, component in components.items():
        _describe_fields(component, structs[name])
    schema_of = {str(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in documented:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fairlead",
            "version": VERSION,
            "summary": "A language-model server that gives every user a fair turn.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {}],  # without configured keys every client may call
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _find_structs(kind: msgspec.inspect.Type, found: dict[str, type[msgspec.Struct]]) -> None:
    """Add the structs that a type has anywhere, by name."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields) if cls.__name__ not in found:
            found[cls.__name__] = cls
            parts = [field.type for field in fields]
        case msgspec.inspect.UnionType(types=types):
            parts = list(types)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            parts = [key, value]
        case (
            msgspec.inspect.ListType(item_type=item)
            | msgspec.inspect.VarTupleType(item_type=item)
            | msgspec.inspect.Metadata(type=item)
        ):
            parts = [item]
        case _:
            parts = []
    for part in parts:
        _find_structs(part, found)


def _describe_fields(component: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Move what the docstrings of a type and of its bases say of its fields to these fields."""
    properties = component.get("properties", {})
    for base in reversed(struct.__mro__):
        if base is not struct and issubclass(base, msgspec.Struct):
            _divide(base.__doc__, properties)
    if others := _divide(component.get("description"), properties):
        component["description"] = others


def _divide(docstring: str | None, properties: dict[str, Any]) -> str:
    """Describe the fields that a docstring documents; return the rest of it."""
    texts: dict[str, list[str]] = {}
    others: list[str] = []
    lines = others
    for line in inspect.cleandoc(docstring or "").splitlines():
        if (found := _FIELD.fullmatch(line)) is not None and found[1] in properties:
            lines = texts[found[1]] = [found[2]]
        elif lines is not others and line.startswith(" "):
            lines.append(line.strip())
        else:
            lines = others
            lines.append(line)
    for name, parts in texts.items():
        words = re.sub(r"\bNone\b", "null", " ".join(parts))
        properties[name] = {**properties[name], "description": words}
    return "\n".join(others).strip()


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in route.parameters
    ]
    parameters += [
        {"name": name, "in": "query", "description": description, "schema": text}
        for name, description in route.query.items()
    ]
    operation: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{route.method.lower()} {route.path}")),
        "tags": [route.tag],
        "summary": route.summary,
        "responses": _responses(route, schema_of),
    }
    if route.refused_fields is not None:
        operation["description"] = unserved.notes(route.refused_fields)
    if parameters:
        operation["parameters"] = parameters
    body = {} if route.form is None else {FORM: {"schema": route.form}}
    if route.body is not None:
        body |= {JSON: {"schema": schema_of[str(route.body)]}}
    if body:
        operation["requestBody"] = {"required": True, "content": body}
    if route.permission in KEYLESS:
        operation["security"] = []
    if route.permission.role != "user":
        operation["x-role"] = route.permission.role  # that a key needs
    return operation


def _responses(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media: {}}
    if route.answer is not None:
        content[route.media] = {"schema": schema_of.get(str(route.answer), {})}
    if route.dialect is not None and route.dialect.streams:
        content[route.dialect.stream_type] = {}
    if route.may_stream:
        content[EVENTS] = {}
    description = ERRORS.get(route.status, "Success.")
    responses: dict[str, Any] = {str(route.status): {"description": description, "content": content}}
    for status in route.states:
        responses[str(status)] = {"description": ERRORS[status], "content": content}
    error = {JSON: {"schema": schema_of[str(route.error)]}}
    for status in route.error_statuses:
        responses[str(status)] = {"description": ERRORS[status], "content": error}
    return responses
