"""Ollama's routes: models and their state, and what precedes a request that a model answers.

A request without content loads its model, or with a `keep_alive` of 0 unloads it. Any other `keep_alive`
replaces the model's `ttl` when the request ends, until the model is unloaded. A load is what any request for
the model causes, so every key may do that. Unloading and another `ttl` concern everybody's requests: as with
`/models/unload`, only an operator's key may do that, and no page of another server. Many clients send a
`keep_alive` with every request, so it has no effect for others, and is not refused.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

import msgspec
import trio

from fairlead.base.errors import Forbidden, InvalidRequest, NotServed
from fairlead.dialects.ollama.chat import OllamaChatDialect
from fairlead.dialects.ollama.embed import EmbedDialect, PromptEmbeddingDialect
from fairlead.dialects.ollama.fields import LONGEST_KEEP_ALIVE_S, OllamaEnvelope, RelayedOptions, keep_alive_s
from fairlead.dialects.ollama.generate import OllamaGenerateDialect
from fairlead.dialects.ollama.shapes import (
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaModel,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShown,
    OllamaStatistics,
)
from fairlead.dialects.ollama.writer import answer_of
from fairlead.dialects.shapes import Version
from fairlead.language.text.model import TextModel
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.routes.generate import GenerationViews
from fairlead.server.routes.ollama_details import (
    NO_FILES,
    ModelFiles,
    capabilities_of,
    digest_of,
    parameters_of,
    read_files,
)
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader

# The version of Ollama that this API follows. Some clients refuse an older server than they need.
OLLAMA_VERSION = "0.13.0"
LATEST = ":latest"

CHAT, GENERATE = OllamaChatDialect(), OllamaGenerateDialect()
EMBED, EMBEDDINGS = EmbedDialect(), PromptEmbeddingDialect()

Reason = Literal["load", "unload"]
Empty = Callable[[str, Reason], msgspec.Struct]


class ShowModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/show`. `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


_show_decoder = msgspec.json.Decoder(ShowModelRequest)


class OllamaRoutes:
    """The views below `/api/`."""

    def __init__(self, reader: RequestReader, generation: GenerationViews, auth: RequestAuth) -> None:
        self._reader = reader
        self._services = reader.jobs.services
        self._fleet = self._services.fleet
        self._models = reader.jobs.models
        self._generation = generation
        self._auth = auth
        self._started = time.time()

    # Generation --------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Handle `POST /api/chat`."""
        begin = partial(self._begin, empty=partial(_empty, chat=True))
        return await self._generation.respond(request, CHAT, intercept=begin)

    async def generate(self, request: Request) -> Response:
        """Handle `POST /api/generate`."""
        begin = partial(self._begin, empty=partial(_empty, chat=False))
        return await self._generation.respond(request, GENERATE, intercept=begin)

    async def embed(self, request: Request) -> Response:
        """Handle `POST /api/embed`."""
        begin = partial(self._begin, empty=_no_embeddings)
        return await self._generation.respond(request, EMBED, intercept=begin)

    async def embeddings(self, request: Request) -> Response:
        """Handle `POST /api/embeddings`."""
        begin = partial(self._begin, empty=lambda _model, _reason: OllamaEmbedding([]))
        return await self._generation.respond(request, EMBEDDINGS, intercept=begin)

    async def _begin(
        self, request: Request, envelope: OllamaEnvelope, *, empty: Empty
    ) -> OllamaEnvelope | Response:
        """Return the envelope with the name of a model that is served, or the response to an empty request.

        Raises `Forbidden`, and what loading and unloading raise.
        """
        kept_s, options = keep_alive_s(envelope.keep_alive), envelope.options or RelayedOptions()
        name = self._served_name(envelope.model)
        is_selector = name is not None and self._models.selectors.has(name)
        envelope = msgspec.structs.replace(
            envelope,
            model=name,
            temperature=options.temperature,
            seed=None if options.seed == -1 else options.seed,
        )
        if envelope.is_empty:
            model = self._models.find(request.api_key, name)
            status = self._fleet.model(model)
            if status is None or status.kind == "remote":  # loading it is left to the other server
                if self._fleet.speaks(model, CHAT.name):
                    return msgspec.structs.replace(envelope, stream=False)  # nothing is streamed
                if kept_s != 0:
                    return json_response(empty(model, "load"))
            return json_response(empty(model, await self._load(request, model, kept_s)))
        if kept_s is not None and not is_selector:
            request.at_end(self._keep, request, self._models.find(request.api_key, name), kept_s)
        return envelope

    async def _load(self, request: Request, model: str, kept_s: float | None) -> Reason:
        """Load or unload a model; return which. Jobs that wait for it stay queued."""
        if kept_s == 0:
            self._auth.check_operator(request)
            await self._fleet.unload(model, wait=True, by=self._reader.requester(request))
            return "unload"
        await self._fleet.load(model, by=self._reader.requester(request))
        if kept_s is not None and self._may_keep(request):
            self._fleet.keep(model, kept_s, by=self._reader.requester(request))
        return "load"

    def _keep(self, request: Request, model: str, kept_s: float) -> None:
        """Apply a `keep_alive` at the end of a request, if it was not refused."""
        if request.is_job and self._may_keep(request):
            self._fleet.keep(model, kept_s, by=self._reader.requester(request))

    def _may_keep(self, request: Request) -> bool:
        try:
            self._auth.check_operator(request)
        except Forbidden:
            return False
        return True

    def _served_name(self, name: str | None) -> str | None:
        """Return the served name that a name means: `llama:latest` may stand for `llama`, and vice versa."""
        if name is None or self._is_served(name):
            return name
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
        return other if self._is_served(other) else name

    def _is_served(self, name: str) -> bool:
        if self._models.selectors.has(name):
            return True
        model = self._services.aliases.get(name, name)
        return self._services.serves(model) or self._services.is_faulty(model)

    # Models ------------------------------------------------------------------------------------------

    async def tags(self, request: Request) -> Response:
        """Handle `GET /api/tags`: list the models that `/v1/models` lists."""
        offered = self._models.offered(request.api_key)
        names = [(status.model, status.model) for status in offered]
        if self._fleet.catalog.config.include_aliases_in_list:
            names += [(alias, status.model) for status in offered for alias in status.aliases]
        names += [(name, name) for name, _ in self._models.selectors.cards(request.api_key)]
        return json_response(OllamaModels([await self._entry(name, model) for name, model in names]))

    async def ps(self, request: Request) -> Response:
        """Handle `GET /api/ps`: list the models that are loaded here."""
        await self._services.refresh()
        loaded = [
            status
            for status in self._models.listed(request.api_key)
            if status.is_resident and status.state in ("ready", "draining")
        ]
        return json_response(OllamaRunningModels([await self._running_entry(status) for status in loaded]))

    async def show(self, request: Request) -> Response:
        """Handle `POST /api/show`, for a name, an alias or a selector."""
        body = await self._reader.read(request, _show_decoder)
        name = self._served_name(body.model or body.name)
        if name is None:
            raise InvalidRequest("model: must be given", param="model")
        model = self._models.find(request.api_key, name)
        text, files = self._services.models.get(model), await self._files(model)
        template = text.chat_template if text is not None else None
        return json_response(
            OllamaShown(
                modelfile=f"FROM {model}\n",
                parameters=parameters_of(text),
                template="" if template is None else template.source,
                details=files.details(),
                model_info={"general.basename": model} | files.info(text),
                capabilities=capabilities_of(text, self._fleet.catalog.models.get(model)),
                modified_at=self._modified_at(text),
            )
        )

    async def ollama_version(self, _request: Request) -> Response:
        """Handle `GET /api/version`."""
        return json_response(Version(OLLAMA_VERSION))

    async def not_served(self, request: Request) -> Response:
        """Refuse a route that changes which models there are: the configuration says that."""
        raise NotServed(f"{request.path} is not served: the server's configuration has its models")

    async def _entry(self, name: str, model: str) -> OllamaModel:
        text, files = self._services.models.get(model), await self._files(model)
        return OllamaModel(
            name=name,
            model=name,
            modified_at=self._modified_at(text),
            size=files.size,
            digest=digest_of(model, text),
            details=files.details(),
        )

    async def _running_entry(self, status: ModelStatus) -> OllamaRunningModel:
        model = status.model
        text, files = self._services.models.get(model), await self._files(model)
        return OllamaRunningModel(
            name=model,
            model=model,
            size=status.memory_bytes or files.size,  # measured some time after the load
            digest=digest_of(model, text),
            details=files.details(),
            expires_at=_written(_after(self._fleet.expires_in_s(model))),
            size_vram=self._fleet.gpu_bytes(model),
            context_length=0 if text is None else text.max_model_len,
        )

    async def _files(self, model: str) -> ModelFiles:
        text = self._services.models.get(model)
        if text is None:
            return NO_FILES
        return await trio.to_thread.run_sync(read_files, text.path, text.created)

    def _modified_at(self, text: TextModel | None) -> str:
        seconds = self._started if text is None else text.created
        return _written(datetime.fromtimestamp(seconds, UTC))


def _empty(model: str, reason: Reason, *, chat: bool) -> OllamaStatistics:
    """Return the answer to a request without content. `reason`: what was done with the model."""
    return answer_of({"done": True, "done_reason": reason}, model=model, chat=chat)


def _no_embeddings(model: str, _reason: Reason) -> OllamaEmbeddings:
    return OllamaEmbeddings(model=model, embeddings=[])


def _after(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=min(seconds, LONGEST_KEEP_ALIVE_S))


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
