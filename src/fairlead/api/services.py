"""What the routes are given. The composition root fills it in; tests fill it in with fakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from fairlead.api.body import told
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
    def estimated_wait_p90_s(self) -> int | None:
        """The wait that nine of ten do not exceed; None also where the estimate in force knows none."""

    @property
    def queue_position(self) -> int | None:
        """The place in the queue on arrival, from 1."""


class Waiting(Protocol):
    """What can be said now of a job that waits."""

    @property
    def position(self) -> int:
        """Its place in the queue, from 1."""

    @property
    def estimated_wait_s(self) -> int:
        """What is left of its wait, whole seconds."""


class Gateway(Protocol):
    """One job's life, in a task of its own. No two jobs it is given at a time share a `request_id`."""

    async def serve(self, job: Job, *, task_status: trio.TaskStatus[Answer] = ...) -> None:
        """Report `started` with the `Answer`; raise a `FairleadError` before that, never after."""

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a job of this owner with `Cancelled`; False if there is none of that id to end."""

    def waiting(self, request_id: str) -> Waiting | None:
        """Return how a job waits; None if it has its seat, or has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything the routes act on. `models` by canonical name; `aliases` from other names to those.

    `estimate` returns, for a model, tenant and priority, what a new job would be told: `position`,
    `estimated_wait_s` and `estimated_wait_p90_s`. `problems` returns what is wrong, by model.
    """

    config: Config
    gateway: Gateway
    models: Mapping[str, TextModel]
    aliases: Mapping[str, str]
    ready: Callable[[], bool]
    queue_statistics: Callable[[], dict[str, Any]]
    estimate: Callable[[str, str, int], dict[str, Any]]
    running: Callable[[], list[dict[str, Any]]]
    problems: Callable[[], Mapping[str, str]] = dict

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
            raise ModelNotFound(f"the model {told(name)} is not served here", param="model")
        return model
