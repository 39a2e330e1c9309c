"""What llama.cpp's clients ask of a server besides answers: its properties and its slots."""

from typing import Any

import msgspec

from fairlead.base.config import CommandConfig
from fairlead.base.errors import NoNode
from fairlead.base.version import VERSION
from fairlead.dialects.llama_cpp.completion import settings_of
from fairlead.dialects.llama_cpp.shapes import ServerProperties, ServerSlot
from fairlead.generation.job_service import JobService
from fairlead.generation.sampling import default_sampling
from fairlead.language.text.model import TextModel
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.routes.request import Request, Response, json_response


class LlamaCppRoutes:
    """The views of `/props` and `/slots`, for the model in the query."""

    def __init__(self, jobs: JobService) -> None:
        self._models = jobs.models
        self._services = jobs.services

    async def props(self, request: Request) -> Response:
        """Handle `GET /props`."""
        model, text, status = await self._find(request)
        config = self._services.fleet.catalog.models.get(model)
        inputs = config.capabilities or {} if isinstance(config, CommandConfig) else {}
        settings: dict[str, Any] = {"n_ctx": 0 if text is None else text.max_model_len}
        if text is not None:
            params = msgspec.structs.asdict(settings_of(default_sampling(text)))
            del params["stop"]  # as in llama.cpp
            settings["params"] = params
        template = None if text is None else text.chat_template
        beginning, end = _ends(text)
        return json_response(
            ServerProperties(
                default_generation_settings=settings,
                total_slots=0 if status is None else status.seats,
                model_alias=model,
                model_path=model,
                modalities={kind: bool(inputs.get(kind)) for kind in ("vision", "audio")},
                chat_template="" if template is None else template.source,
                bos_token=beginning,
                eos_token=end,
                build_info=f"fairlead-{VERSION}",
            )
        )

    async def slots(self, request: Request) -> Response:
        """Handle `GET /slots`. With `fail_on_no_slot`, a model without a free one is a 503."""
        _, text, status = await self._find(request)
        seats, busy = (0, 0) if status is None else (status.seats, status.busy)
        if request.query("fail_on_no_slot") is not None and busy >= seats:
            raise NoNode("no slot is available")
        longest = 0 if text is None else text.max_model_len
        return json_response(
            [ServerSlot(id=number, n_ctx=longest, is_processing=number < busy) for number in range(seats)]
        )

    async def _find(self, request: Request) -> tuple[str, TextModel | None, ModelStatus | None]:
        """Return the requested model, its text side and its status, None where it is not known.

        Raises as `ModelAccess.find` does.
        """
        model = self._models.find(request.api_key, request.query("model"))
        await self._services.refresh()
        return model, self._services.models.get(model), self._services.fleet.model(model)


def _ends(text: TextModel | None) -> tuple[str, str]:
    """Return the texts of the tokens that begin a prompt and end an answer."""
    if text is None:
        return "", ""
    beginning = text.tokenizer.beginning()[:1]
    ends = sorted(text.eos_token_ids)[:1]
    first, last = ([text.tokenizer.spelling(token) or "" for token in ids] for ids in (beginning, ends))
    return "".join(first), "".join(last)
