"""Which models a caller may use, and which one a name in a request stands for."""

from fairlead.base.config import ApiKey
from fairlead.base.errors import Forbidden, InvalidRequest, quoted
from fairlead.generation.selectors import Selectors
from fairlead.generation.services import Services
from fairlead.language.text.model import TextModel
from fairlead.router.fleet.status import ModelStatus


class ModelAccess:
    """The models of all callers, and `selectors`, the names that stand for several."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.selectors = Selectors(services, self.allows)

    def allows(self, api_key: ApiKey | None, model: str) -> bool:
        """Return whether the caller's key is for this model or selector."""
        allowed = api_key.models if api_key is not None else ()
        return not allowed or model in {self._services.aliases.get(name, name) for name in allowed}

    def listed(self, api_key: ApiKey | None) -> list[ModelStatus]:
        """Return the models that the caller may use, except unlisted ones."""
        known = self._services.fleet.models()
        return [status for status in known if not status.unlisted and self.allows(api_key, status.model)]

    def offered(self, api_key: ApiKey | None) -> list[ModelStatus]:
        """Return those of them that are of use now: without remote models that no ready node has.

        A request for such a model may still wait for its node to come back.
        """
        known = self.listed(api_key)
        return [status for status in known if status.kind != "remote" or status.state == "ready"]

    def find(self, api_key: ApiKey | None, name: str | None) -> str:
        """Return the canonical name of a model; without a name, of the only one the caller may use.

        For a selector it is the model that a job would get now. Raises `ModelNotFound`, `Forbidden`, or
        `InvalidRequest` when there are several to choose from.
        """
        if name is None:
            return self._only_model(api_key)
        if self.selectors.has(name):
            return self.selectors.choose(api_key, name).model
        model = self._services.canonical(name)
        if not self.allows(api_key, model):
            raise Forbidden(f"this API key may not use the model {quoted(model)}", param="model")
        return model

    def find_text(self, api_key: ApiKey | None, name: str | None) -> TextModel:
        """Return the model, as `known_text` does. Raises `InvalidRequest` if its tokenizer is unknown."""
        found = self.find(api_key, name)
        model = self.text_of(found)
        if model is None:
            raise InvalidRequest(f"model: the tokens of {quoted(found)} are not known here", param="model")
        return model

    def known_text(self, api_key: ApiKey | None, name: str | None) -> TextModel | None:
        """Return the model, as `find` does; None if its tokenizer is unknown. Raises `FaultyModel`, too."""
        return self.text_of(self.find(api_key, name))

    def text_of(self, model: str) -> TextModel | None:
        """Return the model of this canonical name; None if its tokenizer is unknown. Raises `FaultyModel`."""
        self._services.fleet.catalog.refuse_faulty(model)
        return self._services.models.get(model)

    def _only_model(self, api_key: ApiKey | None) -> str:
        models = self.listed(api_key)
        if len(models) == 1:
            return models[0].model
        if not models and self._services.fleet.models():
            raise Forbidden("this API key may use none of the models that are served", param="model")
        raise InvalidRequest("model: one of the served models must be named", param="model")
