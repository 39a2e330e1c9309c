"""`GET /openapi.json`: every route, with the types of its requests and responses.

The routes decode bodies with the same types; `shapes` has the types of the responses. A test compares the
table below with the registered routes.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
from quart import Quart, request
from quart import Response as QuartResponse

from fairlead.api import schemas, shapes
from fairlead.api.dialects import unserved
from fairlead.api.dialects.openai_chat import ChatCompletionRequest
from fairlead.api.dialects.openai_completions import CompletionRequest
from fairlead.api.dialects.openai_embeddings import EmbeddingRequest
from fairlead.api.exchange import response_of
from fairlead.api.paths import without_version
from fairlead.api.request import json_response
from fairlead.api.tokenize import DescribedTokenizeRequest, DetokenizeRequest
from fairlead.dispatch.dispatcher import DispatchStatistics
from fairlead.dispatch.forecast import Forecast
from fairlead.fleet.status import ModelStatus, NodeStatus
from fairlead.version import VERSION

JSON = "application/json"
EVENTS = "text/event-stream"
COMPONENTS = "#/components/schemas/{name}"

# The descriptions of errors, by status.
ERRORS = {
    400: "The request is wrong; `param` names the field. `context_length_exceeded`: the prompt is too long.",
    401: "No API key, or a wrong one.",
    403: "The API key may not do this; or a page of another server asks for it.",
    404: "There is no such model, route, request or node.",
    408: "It ran longer than `requestTimeout`, or its body took too long to arrive.",
    409: "The model was unloaded while the request waited for it, or the request does not load it.",
    413: "The body is too large.",
    429: "There is no room for now: come back after `Retry-After` seconds.",
    500: "Something of ours broke.",
    502: "The node failed, or the model cannot be loaded.",
    503: "There is no capacity to be had for now.",
    504: "It waited longer than `queue.timeout`.",
}
_READING = (400, 413)
_JOB = (400, 403, 404, 408, 409, 413, 429, 500, 502, 503, 504)


class Operation(NamedTuple):
    """One method of one path. `takes` and `gives` are types; `media` the response's type, if not JSON.

    `streams`: the response may be a stream of events instead. `errors`: statuses besides 401 and 403, which
    all routes have that need a key. `states`: error statuses whose response has the same form as a successful
    one. `refuses`: fields of other servers.
    """

    method: str
    path: str
    tag: str
    summary: str
    takes: Any = None
    gives: Any = None
    errors: tuple[int, ...] = ()
    status: int = 200
    media: str = JSON
    streams: bool = False
    query: tuple[tuple[str, str], ...] = ()
    is_open: bool = False
    states: tuple[int, ...] = ()
    refuses: unserved.Fields | None = None


class RelayedShape(msgspec.Struct, frozen=True):
    """A body that is relayed to the server which has the model; that server reads the other fields."""

    model: str
    stream: bool | None = None


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "generate",
        "The next message of a chat.",
        ChatCompletionRequest,
        shapes.ChatCompletion,
        _JOB,
        streams=True,
        refuses=unserved.CHAT,
    ),
    Operation(
        "post",
        "/v1/completions",
        "generate",
        "How a text goes on.",
        CompletionRequest,
        shapes.TextCompletion,
        _JOB,
        streams=True,
        refuses=unserved.COMPLETION,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "generate",
        "What texts mean, as vectors.",
        EmbeddingRequest,
        shapes.EmbeddingList,
        _JOB,
        refuses=unserved.EMBEDDING,
    ),
    Operation(
        "post", "/v1/responses", "generate", "OpenAI's responses.", RelayedShape, Any, _JOB, streams=True
    ),
    Operation(
        "post", "/v1/messages", "generate", "Anthropic's messages.", RelayedShape, Any, _JOB, streams=True
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "generate", "How long a message is.", RelayedShape, Any, _JOB
    ),
    Operation(
        "post",
        "/v1/requests/{request_id}/cancel",
        "generate",
        "End a request of the same key, waiting or running, by its X-Request-Id.",
        gives=shapes.CancelledRequest,
        errors=(404,),
    ),
    Operation("get", "/v1/models", "models", "The models that the key may use.", gives=shapes.ModelList),
    Operation(
        "get",
        "/v1/models/{name}",
        "models",
        "A model, by name or alias.",
        gives=shapes.ModelCard,
        errors=(403, 404),
    ),
    Operation(
        "post",
        "/tokenize",
        "models",
        "A text, or messages, as token ids.",
        DescribedTokenizeRequest,
        shapes.Tokenized,
        (*_READING, 403, 404),
        refuses=unserved.TOKENIZE,
    ),
    Operation(
        "post",
        "/detokenize",
        "models",
        "Token ids as a text.",
        DetokenizeRequest,
        shapes.Detokenized,
        (*_READING, 403, 404),
    ),
    Operation("get", "/queue", "queue", "The queue's totals.", gives=DispatchStatistics),
    Operation(
        "get",
        "/queue/estimate",
        "queue",
        "What a new request of the caller would be told; X-Priority as in one.",
        gives=Forecast,
        errors=(400, 403, 404),
        query=(("model", "The model that it would be for; not needed if there is only one."),),
    ),
    Operation(
        "get",
        "/running",
        "fleet",
        "The models that have a process here, as far as the key may use them.",
        gives=list[ModelStatus],
    ),
    Operation(
        "post",
        "/models/load",
        "fleet",
        "Load a model; answered when it is ready.",
        schemas.LoadModelRequest,
        ModelStatus,
        (*_READING, 403, 404, 409, 502),
    ),
    Operation(
        "post",
        "/models/unload",
        "fleet",
        "Unload a model; answered when its process is gone. Requests that wait for it are answered 409.",
        schemas.UnloadModelRequest,
        ModelStatus,
        (*_READING, 403, 404),
        query=(("wait", "true: requests that wait for the model stay queued, and it is loaded again."),),
    ),
    Operation(
        "get",
        "/models/{name}/logs",
        "fleet",
        "What the processes of a model have printed, the last lines; control characters are escaped.",
        errors=(400, 403, 404, 429),
        media="text/plain",
        query=(("follow", "true: go on with what is printed from now on. Default: false."),),
    ),
    Operation(
        "get",
        "/nodes",
        "fleet",
        "The nodes of the models that the key may use.",
        gives=list[NodeStatus],
        errors=(403,),
    ),
    Operation(
        "post",
        "/nodes",
        "fleet",
        "Take a server elsewhere into service.",
        schemas.AddNodeRequest,
        NodeStatus,
        (*_READING, 403, 404),
        status=201,
    ),
    Operation(
        "delete",
        "/nodes/{node_id}",
        "fleet",
        "Take a node out of service; answered when its jobs are finished.",
        gives=shapes.RemovedNode,
        errors=(400, 403, 404),
    ),
    Operation(
        "post",
        "/nodes/{node_id}/drain",
        "fleet",
        "Give a node no more jobs.",
        gives=NodeStatus,
        errors=(400, 403, 404),
    ),
    Operation(
        "get",
        "/health",
        "server",
        "200: the process lives and no model is stuck. Needs no key.",
        gives=shapes.ServerState,
        states=(503,),
        is_open=True,
    ),
    Operation(
        "get",
        "/ready",
        "server",
        "200: no job would wait for a model to be loaded. Needs no key.",
        gives=shapes.ServerState,
        states=(503,),
        is_open=True,
    ),
    *(
        Operation(
            method,
            "/upstream/{upstream_path}",
            "models",
            "Any request to the server that a command started: the model's name, then the path there.",
            errors=(*_JOB, 409),
            media="*/*",
        )
        for method in ("get", "post", "put", "patch", "delete")
    ),
    Operation("get", "/version", "server", "The program's version.", gives=shapes.Version),
    Operation(
        "get",
        "/metrics",
        "server",
        "Counts for Prometheus; of models and users, those of the key.",
        media="text/plain",
    ),
    Operation(
        "get",
        "/events",
        "server",
        "What the dashboard shows, as it changes; of models and nodes, those of the key.",
        errors=(429,),
        media=EVENTS,
    ),
    Operation("get", "/openapi.json", "server", "This document.", gives=dict[str, Any]),
    Operation("get", "/", "server", "The dashboard.", errors=(403,), media="text/html", is_open=True),
)


class OpenApi:
    """The route `/openapi.json`."""

    def add_to(self, app: Quart) -> None:
        """Register the route."""
        app.add_url_rule("/openapi.json", view_func=self.document, methods=["GET"])

    async def document(self) -> QuartResponse:
        """Return the document, in JSON. Below a prefix it names the prefix, which its paths do not have."""
        return response_of(json_response(_encoded(request.scope.get("prefix", ""))))


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    types = [kind for each in OPERATIONS for kind in (each.takes, each.gives) if kind not in (None, Any)]
    types.append(shapes.ErrorAnswer)
    described, components = msgspec.json.schema_components(types, ref_template=COMPONENTS)
    schema_of = {str(kind): schema for kind, schema in zip(types, described, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in (*OPERATIONS, *_without_version()):
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema_of)
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


def _without_version() -> Iterator[Operation]:
    """Yield OpenAI's operations under the same paths without `/v1`."""
    by_rule = {operation.path.replace("{name}", "<path:name>"): operation for operation in OPERATIONS}
    for rule, operation in without_version(by_rule).items():
        path = rule.replace("<path:name>", "{name}")
        summary = f"The same as {operation.method.upper()} {operation.path}."
        yield operation._replace(path=path, summary=summary, refuses=None)


@cache
def _encoded(prefix: str) -> bytes:
    servers = {"servers": [{"url": prefix}]} if prefix else {}
    return msgspec.json.encode(document() | servers)


def _described(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ] + [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in operation.query
    ]
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{operation.method} {operation.path}")),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _responses(operation, schema_of),
    }
    if operation.refuses is not None:
        described["description"] = unserved.notes(operation.refuses)
    if parameters:
        described["parameters"] = parameters
    if operation.takes is not None:
        body = {JSON: {"schema": schema_of[str(operation.takes)]}}
        described["requestBody"] = {"required": True, "content": body}
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {}}
    if operation.gives is not None:
        content[operation.media] = {"schema": schema_of.get(str(operation.gives), {})}
    if operation.streams:
        content[EVENTS] = {}
    responses: dict[str, Any] = {str(operation.status): {"description": "Done.", "content": content}}
    for status in operation.states:
        responses[str(status)] = {"description": ERRORS[status], "content": content}
    error = {JSON: {"schema": schema_of[str(shapes.ErrorAnswer)]}}
    for status in sorted({*operation.errors, *(() if operation.is_open else (401, 403))}):
        responses[str(status)] = {"description": ERRORS[status], "content": error}
    return responses
