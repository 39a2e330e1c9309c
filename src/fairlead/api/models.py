"""OpenAI's list of models: `GET /v1/models`, and `/v1/models/{name}`."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from quart import Quart, g
from quart import Response as QuartResponse

from fairlead.api.exchange import quart_json_response
from fairlead.api.job_service import JobService
from fairlead.api.paths import without_version
from fairlead.config import CommandConfig


class ModelRoutes:
    """The routes `/v1/models` and below."""

    def __init__(self, jobs: JobService) -> None:
        self._models = jobs.models
        self._services = jobs.services
        self._started = int(time.time())

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        listing: dict[str, Callable[..., Awaitable[QuartResponse]]] = {
            "/v1/models": self.models,
            "/v1/models/<path:name>": self.model,
        }
        for rule, view in (listing | without_version(listing)).items():
            app.add_url_rule(rule, view_func=view, methods=["GET"])

    async def models(self) -> QuartResponse:
        """Handle `GET /v1/models`."""
        offered = self._models.offered(g.call)
        served = [self._card(status.model) for status in offered]
        if self._services.fleet.lists_aliases:
            served += [
                self._card(status.model) | {"id": alias} for status in offered for alias in status.aliases
            ]
        selectors = [self._blank_card(name) | card for name, card in self._models.selectors.cards(g.call)]
        return quart_json_response({"object": "list", "data": served + selectors})

    async def model(self, name: str) -> QuartResponse:
        """Handle `GET /v1/models/{id}`, for a name, an alias or a selector."""
        found = self._models.find(g.call, name)
        if (card := self._models.selectors.card(g.call, name)) is not None:
            return quart_json_response(self._blank_card(name) | card)
        return quart_json_response(self._card(found))

    def _card(self, name: str) -> dict[str, Any]:
        """Return a model's entry in the list, with more fields if its tokenizer is known here."""
        card = self._blank_card(name)
        if (model := self._services.models.get(name)) is not None:
            card |= {"created": model.created, "max_model_len": model.max_model_len}
            card["task"] = "generate" if model.embedding is None else "embed"
        config = self._services.fleet.configured(name)
        if isinstance(config, CommandConfig):
            card |= _described(config)
        return card

    def _blank_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "fairlead",
            "root": name,
            "parent": None,
        }


def _described(config: CommandConfig) -> dict[str, Any]:
    """Return the descriptive fields of a command's configuration, in llama-swap's format."""
    fields = {
        "name": config.title,
        "description": config.description,
        "capabilities": config.capabilities,
        "meta": {"llamaswap": config.metadata} if config.metadata else None,
    }
    return {name: value for name, value in fields.items() if value}
