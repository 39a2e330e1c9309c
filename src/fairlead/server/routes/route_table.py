"""The route table: every method and path that the server has.

The matcher of paths (`paths`), the routes that are handled without Quart, authentication and the OpenAPI
document read this table. A new dialect is its module in `dialects`, and its row here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fairlead.dialects import shapes
from fairlead.dialects.anthropic.messages import CountTokensDialect, MessagesDialect
from fairlead.dialects.dialect import RelayDialect
from fairlead.dialects.llama_cpp.completion import NativeCompletionDialect
from fairlead.dialects.llama_cpp.shapes import AppliedTemplate, ServerProperties, ServerSlot
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.dialects.openai.completions import CompletionDialect
from fairlead.dialects.openai.embeddings import EmbeddingDialect
from fairlead.dialects.rerank.rerank import CohereRerankDialect, RerankDialect
from fairlead.dialects.rerank.score import ScoreDialect
from fairlead.dialects.unserved import TOKENIZE
from fairlead.router.dispatch.dispatcher import DispatchStatistics
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.fleet.status import ModelStatus, NodeStatus
from fairlead.server.batches.table import BATCH_ROUTES
from fairlead.server.dashboard.pages import Dashboard
from fairlead.server.organization.table import ORGANIZATION_ROUTES
from fairlead.server.responses.table import RESPONSE_ROUTES
from fairlead.server.routes import schemas
from fairlead.server.routes.admin import Admin
from fairlead.server.routes.board import BoardRoutes, PeopleList, RequestList, TimingList
from fairlead.server.routes.events import Events
from fairlead.server.routes.fleet import FleetRoutes
from fairlead.server.routes.generate import INVOCATION_BODY, GenerationViews
from fairlead.server.routes.llama_cpp import LlamaCppRoutes
from fairlead.server.routes.media import MediaBody, MediaRoutes, describe_form
from fairlead.server.routes.metrics import Metrics
from fairlead.server.routes.models import ModelRoutes
from fairlead.server.routes.ollama_table import OLLAMA_ROUTES
from fairlead.server.routes.openapi import OpenApi
from fairlead.server.routes.paths import UPSTREAM
from fairlead.server.routes.queue import QueueRoutes
from fairlead.server.routes.route import (
    ERRORS_OF_JOBS,
    EVENTS,
    VERSION,
    Permission,
    Route,
    dialect_route,
    group,
)
from fairlead.server.routes.tokenize import (
    ApplyTemplateRequest,
    DescribedTokenizeRequest,
    DetokenizeRequest,
    Tokens,
)
from fairlead.server.routes.upstream import METHODS, UpstreamRoute

_get = partial(Route, method="GET")
_post = partial(Route, method="POST")


_GENERATION = group(
    "generate",
    dialect_route(ChatDialect(), "Generate the next message of a chat.", is_versionless=True),
    dialect_route(CompletionDialect(), "Complete a text.", is_versionless=True),
    dialect_route(EmbeddingDialect(), "Compute the embeddings of texts.", is_versionless=True),
    dialect_route(
        RerankDialect(),
        "Sort documents by their relevance to a query, as in Jina's API.",
        is_versionless=True,
    ),
    dialect_route(CohereRerankDialect(), "The same as POST /v1/rerank, under Cohere's path."),
    dialect_route(
        ScoreDialect(), "Compute the similarity of pairs of texts, as in vLLM's API.", is_versionless=True
    ),
    _post(
        path="/invocations",
        view=GenerationViews.invocations,
        permission=Permission.KEY,
        is_direct=True,
        summary="A chat, a completion, embeddings, a ranking or scores, by the fields of the body, as "
        "SageMaker calls a server.",
        body=INVOCATION_BODY,
        answer=dict[str, Any],
        may_stream=True,
        errors=ERRORS_OF_JOBS,
    ),
    *RESPONSE_ROUTES,
    dialect_route(MessagesDialect(), "Create a message in Anthropic's API."),
    dialect_route(CountTokensDialect(), "Count the tokens of a message's prompt in Anthropic's API."),
    _post(
        path="/v1/requests/{request_id}/cancel",
        view=QueueRoutes.cancel,
        permission=Permission.KEY,
        summary="Cancel a waiting or running request of the same key and user, by its X-Request-Id. An "
        "operator's key cancels those of others, too.",
        answer=shapes.CancelledRequest,
        errors=(404,),
    ),
)

_media = partial(
    _post,
    view=MediaRoutes.relay,
    permission=Permission.KEY,
    is_direct=True,
    is_versionless=True,
    body=MediaBody,
    media="*/*",
    errors=ERRORS_OF_JOBS,
)

_MEDIA = group(
    "media",
    _media(
        path="/v1/audio/transcriptions",
        summary="Transcribe speech.",
        form=describe_form("file"),
    ),
    _media(
        path="/v1/audio/translations",
        summary="Transcribe speech, in English.",
        form=describe_form("file"),
    ),
    _media(path="/v1/audio/speech", summary="Speak a text."),
    _get(
        path="/v1/audio/voices",
        view=MediaRoutes.voices,
        permission=Permission.KEY,
        is_versionless=True,
        summary="List the voices of a model, as its server does.",
        media="*/*",
        errors=ERRORS_OF_JOBS,
        query={"model": "The model. Not needed if there is only one."},
    ),
    _media(path="/v1/images/generations", summary="Generate images."),
    _media(
        path="/v1/images/edits",
        summary="Edit images.",
        form=describe_form("image", "mask"),
    ),
    _media(
        path="/v1/images/variations",
        summary="Generate variations of an image.",
        form=describe_form("image"),
    ),
    _media(path="/v1/moderations", summary="Classify texts that may be harmful."),
)

_MODELS = group(
    "models",
    _get(
        path="/v1/models",
        view=ModelRoutes.models,
        permission=Permission.KEY,
        is_versionless=True,
        summary="List the models that the key may use.",
        answer=shapes.ModelList,
    ),
    _get(
        path="/v1/models/{name}",
        view=ModelRoutes.model,
        permission=Permission.KEY,
        is_versionless=True,
        summary="Describe a model, by its name or an alias.",
        answer=shapes.ModelCard,
        errors=(404,),
    ),
    _post(
        path="/tokenize",
        view=Tokens.tokenize,
        permission=Permission.KEY,
        is_direct=True,
        summary="Convert a text, or messages, to token ids.",
        body=DescribedTokenizeRequest,
        answer=shapes.Tokenized,
        errors=(404,),
        refused_fields=TOKENIZE,
    ),
    _post(
        path="/detokenize",
        view=Tokens.detokenize,
        permission=Permission.KEY,
        is_direct=True,
        summary="Convert token ids to a text.",
        body=DetokenizeRequest,
        answer=shapes.Detokenized,
        errors=(404,),
    ),
    _get(
        path="/tokenizer_info",
        view=ModelRoutes.tokenizer_info,
        permission=Permission.KEY,
        summary="Return a model's tokenizer_config.json with its chat template, as in vLLM's API.",
        answer=dict[str, Any],
        errors=(400, 404),
        query={"model": "The model. Not needed if there is only one."},
    ),
    *(
        Route(
            method=method,
            path=f"{UPSTREAM}{{upstream_path}}",
            view=UpstreamRoute.relay,
            permission=Permission.KEY,
            summary="Relay any request to a command's own server: the model's name, then the path there.",
            media="*/*",
            errors=ERRORS_OF_JOBS,
        )
        for method in METHODS
    ),
)

_LLAMA_CPP = group(
    "llama.cpp",
    dialect_route(NativeCompletionDialect(), "Complete a text in llama.cpp's native API."),
    _post(
        path="/apply-template",
        view=Tokens.apply_template,
        permission=Permission.KEY,
        is_direct=True,
        summary="Render messages with the model's chat template, to a prompt of /completion.",
        body=ApplyTemplateRequest,
        answer=AppliedTemplate,
        errors=(404,),
    ),
    _get(
        path="/props",
        view=LlamaCppRoutes.props,
        permission=Permission.KEY,
        summary="Describe a model: its context, its chat template, and how many sequences may run.",
        answer=ServerProperties,
        errors=(400, 404),
        query={"model": "The model. Not needed if there is only one."},
    ),
    _get(
        path="/slots",
        view=LlamaCppRoutes.slots,
        permission=Permission.KEY,
        summary="List the seats of a model, without what runs in them.",
        answer=list[ServerSlot],
        errors=(400, 404, 503),
        query={
            "model": "The model. Not needed if there is only one.",
            "fail_on_no_slot": "If it is present, a model without a free seat is a 503.",
        },
    ),
)

_QUEUE = group(
    "queue",
    _get(
        path="/queue",
        view=QueueRoutes.queue,
        permission=Permission.KEY,
        summary="Return the queue's totals.",
        answer=DispatchStatistics,
    ),
    _get(
        path="/queue/estimate",
        view=QueueRoutes.estimate,
        permission=Permission.KEY,
        summary="Estimate the wait of a new request of the caller. X-Priority is as in a request.",
        answer=WaitEstimate,
        errors=(400, 404),
        query={"model": "The model of the request. Not needed if there is only one."},
    ),
    _get(
        path="/v1/requests",
        view=BoardRoutes.requests,
        permission=Permission.STRICT,
        summary="List the requests that wait or run, and the last 1000 that ended: with an operator's key "
        "everybody's, with any other key its own.",
        answer=RequestList,
        errors=(400, 503),
        query={
            "state": "Only those that are waiting, running or ended.",
            "model": "Only those for this model.",
            "tenant": "Only those of this tenant.",
            "team": "Only those of this team.",
            "node": "Only those at this node.",
            "priority": "Only those of this class.",
            "outcome": "Only those with this outcome: success, client_left, an error's code; failed: all but "
            "success.",
            "limit": "Maximum number of open ones, and of those that ended. Default: 1000.",
        },
    ),
    _get(
        path="/tenants",
        view=BoardRoutes.people,
        permission=Permission.STRICT,
        summary="List the tenants of the last day with their open requests, shares, limits and budgets: with "
        "an operator's key all, with any other key its own.",
        answer=PeopleList,
        errors=(503,),
    ),
    _get(
        path="/timings",
        view=BoardRoutes.timings,
        permission=Permission.STRICT,
        summary="Return how long requests took and how they ended; unless with an operator's key, of the "
        "caller's own among the last 1000.",
        answer=TimingList,
        errors=(400, 503),
        query={"window": "10m, 1h or 24h. Default: 1h."},
    ),
)

_FLEET = group(
    "fleet",
    _get(
        path="/running",
        view=Admin.running,
        permission=Permission.KEY,
        summary="List the models that have a process here, among those that the key may use.",
        answer=list[ModelStatus],
    ),
    _post(
        path="/models/load",
        view=FleetRoutes.load,
        permission=Permission.OPERATOR,
        summary="Load a model. Responds when it is ready.",
        body=schemas.LoadModelRequest,
        answer=ModelStatus,
        errors=(404, 409, 502),
    ),
    _post(
        path="/models/unload",
        view=FleetRoutes.unload,
        permission=Permission.OPERATOR,
        summary="Unload a model. Responds when its process has ended. Requests that wait for it get a 409.",
        body=schemas.UnloadModelRequest,
        answer=ModelStatus,
        errors=(404,),
        query={"wait": "true: requests that wait for the model stay queued, and it is loaded again."},
    ),
    _get(
        path="/models/{name}/logs",
        view=FleetRoutes.logs,
        permission=Permission.OPERATOR,
        summary="Return the last lines that a model's processes printed. Control characters are escaped.",
        media="text/plain",
        errors=(400, 404, 429),
        query={"follow": "true: also send each line that is printed from now on. Default: false."},
    ),
    _get(
        path="/nodes",
        view=FleetRoutes.nodes,
        permission=Permission.STRICT,
        summary="List the nodes of the models that the key may use.",
        answer=list[NodeStatus],
    ),
    _post(
        path="/nodes",
        view=FleetRoutes.add_node,
        permission=Permission.ADMIN,
        summary="Add a remote server as a node.",
        body=schemas.AddNodeRequest,
        answer=NodeStatus,
        status=201,
        errors=(404,),
    ),
    Route(
        method="DELETE",
        path="/nodes/{node_id}",
        view=FleetRoutes.remove_node,
        permission=Permission.ADMIN,
        summary="Remove a remote node. Responds when its jobs are finished.",
        answer=shapes.RemovedNode,
        errors=(400, 404),
    ),
    _post(
        path="/nodes/{node_id}/drain",
        view=FleetRoutes.drain_node,
        permission=Permission.ALL_MODELS,
        summary="Give a remote node no more jobs.",
        answer=NodeStatus,
        errors=(400, 404),
    ),
)

_SERVER = group(
    "server",
    _get(
        path="/health",
        view=Admin.health,
        permission=Permission.PROBE,
        summary="200: the process responds, and no model is stuck in a step. Needs no key.",
        answer=shapes.ServerState,
        states=(503,),
    ),
    _get(
        path="/ready",
        view=Admin.ready,
        permission=Permission.PROBE,
        summary="200: all models to preload are loaded, none waits for its restart, and the server is not "
        "being stopped. Needs no key.",
        answer=shapes.ServerState,
        states=(503,),
    ),
    *(
        Route(
            method=method,
            path="/ping",
            view=Admin.health,
            permission=Permission.PROBE,
            summary="The same as GET /health, as SageMaker calls it.",
            answer=shapes.ServerState,
            states=(503,),
        )
        for method in ("GET", "POST")
    ),
    _get(
        path="/load",
        view=Admin.load,
        permission=Permission.KEY,
        summary="Return how many requests wait or run, as vLLM's servers do.",
        answer=shapes.ServerLoad,
    ),
    _get(
        path="/version",
        view=Admin.version,
        permission=Permission.KEY,
        summary="Return the program's version.",
        answer=shapes.Version,
    ),
    _get(
        path="/metrics",
        view=Metrics.metrics,
        permission=Permission.KEY,
        summary="Return the metrics for Prometheus. Those of models and users are the key's.",
        media="text/plain",
    ),
    _get(
        path="/events",
        view=Events.events,
        permission=Permission.KEY,
        summary="Stream the dashboard's data as it changes. Those of models and nodes are the key's.",
        media=EVENTS,
        errors=(429,),
    ),
    _get(
        path="/openapi.json",
        view=OpenApi.document,
        permission=Permission.KEY,
        summary="Return this document.",
        answer=dict[str, Any],
    ),
    _get(
        path="/",
        view=Dashboard.page,
        permission=Permission.OPEN,
        summary="Return the dashboard.",
        media="text/html",
    ),
)

_DASHBOARD_FILES = _get(path="/dashboard/{name}", view=Dashboard.file, permission=Permission.OPEN)


def _without_version(routes: tuple[Route, ...]) -> Iterator[Route]:
    """Yield OpenAI's routes under the same paths without `/v1`, for clients with a base URL that lacks it."""
    for route in routes:
        if route.is_versionless:
            summary = f"The same as {route.method} {route.path}."
            yield replace(route, path=route.path.removeprefix(VERSION), summary=summary, refused_fields=None)


_WITH_VERSION = (
    *_GENERATION,
    *BATCH_ROUTES,
    *_MEDIA,
    *OLLAMA_ROUTES,
    *_MODELS,
    *_LLAMA_CPP,
    *_QUEUE,
    *_FLEET,
    *ORGANIZATION_ROUTES,
    *_SERVER,
    _DASHBOARD_FILES,
)
ROUTES = (*_WITH_VERSION, *_without_version(_WITH_VERSION))


def dialects_of(routes: Iterable[Route]) -> Iterator[RelayDialect]:
    """Yield the dialects of the routes that have one."""
    return (route.dialect for route in routes if route.dialect is not None)
