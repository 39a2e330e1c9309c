"""OpenAI's list of models: `GET /v1/models`, and `/v1/models/{name}`."""

import time
from typing import Any

from msgspec.structs import replace

from fairlead.base.config import CommandConfig
from fairlead.dialects.shapes import ModelCard, ModelList
from fairlead.generation.job_service import JobService
from fairlead.server.routes.request import Request, Response, json_response


class ModelRoutes:
    """The views of `/v1/models` and below."""

    def __init__(self, jobs: JobService) -> None:
        self._models = jobs.models
        self._services = jobs.services
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


def _described(config: CommandConfig) -> dict[str, Any]:
    """Return the descriptive fields of a command's configuration, in llama-swap's format."""
    fields = {
        "name": config.title,
        "description": config.description,
        "capabilities": config.capabilities,
        "meta": {"llamaswap": config.metadata} if config.metadata else None,
    }
    return {name: value for name, value in fields.items() if value}
