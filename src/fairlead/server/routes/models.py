"""OpenAI's list of models: `GET /v1/models`, and `/v1/models/{name}`."""

import time
from typing import Any

from msgspec.structs import replace

from fairlead.base.config import CommandConfig
from fairlead.dialects.shapes import ModelCard, ModelList
from fairlead.generation.job_service import JobService
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.text.files import read_json
from fairlead.language.text.model import TextModel
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_caller import tenant_so_far


class ModelRoutes:
    """The views of `/v1/models` and below."""

    def __init__(self, jobs: JobService) -> None:
        self._models = jobs.models
        self._services = jobs.services
        self._offload = jobs.offload
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        """Handle `GET /v1/models`."""
        offered = self._models.offered(request.api_key)
        served = [self._card(status.model) for status in offered]
        if self._services.fleet.catalog.config.include_aliases_in_list:
            served += [
                replace(self._card(status.model), id=alias) for status in offered for alias in status.aliases
            ]
        selectors = [
            self._new_card(name, **card) for name, card in self._models.selectors.cards(request.api_key)
        ]
        return json_response(ModelList("list", served + selectors))

    async def model(self, request: Request) -> Response:
        """Handle `GET /v1/models/{name}`, for a name, an alias or a selector."""
        name = request.path_parameters["name"]
        found = self._models.find(request.api_key, name)
        if (card := self._models.selectors.card(request.api_key, name)) is not None:
            return json_response(self._new_card(name, **card))
        return json_response(self._card(found))

    async def tokenizer_info(self, request: Request) -> Response:
        """Handle `GET /tokenizer_info`, for the model in the query."""
        model = self._models.find_text(request.api_key, request.query("model"))
        in_thread = self._offload.in_thread
        return json_response(await in_thread(tenant_so_far(request), tokenizer_info, model))

    def _card(self, name: str) -> ModelCard:
        """Return a model's entry in the list, with more fields if its tokenizer is known here."""
        more: dict[str, Any] = {}
        if (model := self._services.models.get(name)) is not None:
            more |= {"created": model.created, "max_model_len": model.max_model_len, "task": model.task}
            if model.infill is not None:
                more["infill"] = True
        catalog = self._services.fleet.catalog
        if (fault := catalog.faults.get(name)) is not None:
            more["problem"] = fault.message
        config = catalog.models.get(name)
        if isinstance(config, CommandConfig):
            more |= _described(config)
        return self._new_card(name, **more)

    def _new_card(self, model: str, /, *, created: int | None = None, **more: Any) -> ModelCard:
        """Return an entry with further fields. `created`: in seconds since 1970; None: the server's start."""
        created = self._started if created is None else created
        return ModelCard(model, "model", created, "fairlead", root=model, parent=None, **more)


def tokenizer_info(model: TextModel) -> dict[str, Any]:
    """Return a model's tokenizer_config.json with its chat template, wherever that is.

    Paths of the machine where the tokenizer was saved are left out.
    """
    path = open_checkpoint(model.path).document("tokenizer_config.json")
    known = read_json(path, dict[str, Any]) if path.is_file() else {}
    found = {"tokenizer_class": "PreTrainedTokenizerFast"} | known
    if model.chat_template is not None:
        found["chat_template"] = model.chat_template.source
    for name in ("name_or_path", "tokenizer_file", "special_tokens_map_file"):
        found.pop(name, None)
    return found


def _described(config: CommandConfig) -> dict[str, Any]:
    """Return the descriptive fields of a command's configuration, in llama-swap's format."""
    fields = {
        "name": config.title,
        "description": config.description,
        "capabilities": config.capabilities,
        "meta": {"llamaswap": config.metadata} if config.metadata else None,
    }
    return {name: value for name, value in fields.items() if value}
