"""What the routes are given. The composition root fills it in; tests fill it in with fakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from fairlead.config import Config
from fairlead.errors import InvalidRequest, ModelNotFound
from fairlead.job import Job
from fairlead.nodes.deltas import Deltas
from fairlead.text.model import TextModel


class Answer(Protocol):
    """What a route has once the first delta is there; None for what only those who waited have."""

    @property
    def deltas(self) -> Deltas:
        """The answer, as it comes."""

    @property
    def estimated_wait_s(self) -> int | None:
        """What was estimated on arrival, whole seconds."""

    @property
    def queue_position(self) -> int | None:
        """The place in the queue on arrival, from 1."""


class Gateway(Protocol):
    """One job's life, in a task of its own."""

    async def serve(self, job: Job, *, task_status: trio.TaskStatus[Answer] = ...) -> None:
        """Report `started` with the `Answer`; raise a `FairleadError` before that, never after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything the routes act on. `models` by canonical name; `aliases` from other names to those."""

    config: Config
    gateway: Gateway
    models: Mapping[str, TextModel]
    aliases: Mapping[str, str]
    ready: Callable[[], bool]
    queue_statistics: Callable[[], dict[str, Any]]
    running: Callable[[], list[dict[str, Any]]]

    def find_model(self, name: str | None) -> TextModel:
        """Return the model of that name or alias; without a name, the only one there is.

        Raises `ModelNotFound`, or `InvalidRequest` when there are several to choose from.
        """
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise InvalidRequest("model: one of the served models must be named", param="model")
        model = self.models.get(self.aliases.get(name, name))
        if model is None:
            shown = name if len(name) <= 100 else f"{name[:100]}…"
            raise ModelNotFound(f"the model {shown!r} is not served here", param="model")
        return model
