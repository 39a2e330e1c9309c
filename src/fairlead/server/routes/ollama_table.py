"""Ollama's rows of the route table."""

from dataclasses import replace
from functools import partial

from fairlead.dialects import shapes
from fairlead.dialects.fields import describe_alternatives
from fairlead.dialects.ollama import shapes as ollama_shapes
from fairlead.server.routes.ollama import CHAT, EMBED, EMBEDDINGS, GENERATE, OllamaRoutes, ShowModelRequest
from fairlead.server.routes.route import Permission, Route, dialect_route, group

_get = partial(Route, method="GET")
_post = partial(Route, method="POST")

OLLAMA_ROUTES = tuple(
    replace(route, error=ollama_shapes.OllamaError)
    for route in group(
        "ollama",
        replace(dialect_route(CHAT, "Generate the next message of a chat."), view=OllamaRoutes.chat),
        replace(dialect_route(GENERATE, "Generate a text."), view=OllamaRoutes.generate),
        replace(dialect_route(EMBED, "Compute the embeddings of texts."), view=OllamaRoutes.embed),
        replace(dialect_route(EMBEDDINGS, "Compute the embedding of a text."), view=OllamaRoutes.embeddings),
        _get(
            path="/api/tags",
            view=OllamaRoutes.tags,
            permission=Permission.KEY,
            summary="List the models that the key may use.",
            answer=ollama_shapes.OllamaModels,
        ),
        _get(
            path="/api/ps",
            view=OllamaRoutes.ps,
            permission=Permission.KEY,
            summary="List the loaded models that the key may use.",
            answer=ollama_shapes.OllamaRunningModels,
        ),
        _post(
            path="/api/show",
            view=OllamaRoutes.show,
            permission=Permission.KEY,
            summary="Describe a model, by its name or an alias.",
            body=describe_alternatives(ShowModelRequest, {"model": "string"}, {"name": "string"}),
            answer=ollama_shapes.OllamaShown,
            errors=(404,),
        ),
        _get(
            path="/api/version",
            view=OllamaRoutes.ollama_version,
            permission=Permission.KEY,
            summary="Return the version of Ollama that this API follows.",
            answer=shapes.Version,
        ),
        *(
            Route(
                method=method,
                path=f"/api/{path}",
                view=OllamaRoutes.not_served,
                permission=Permission.KEY,
                summary="Not served: the configuration has the models.",
                answer=ollama_shapes.OllamaError,
                status=501,
            )
            for method, path in (
                *(("POST", name) for name in ("pull", "push", "create", "copy", "blobs/{digest}")),
                ("DELETE", "delete"),
            )
        ),
    )
)
