"""A row of the route table: a method, a path, the permission, the view and the documentation."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from fairlead.base.config import Role
from fairlead.dialects import shapes
from fairlead.dialects.dialect import RelayDialect
from fairlead.dialects.unserved import Fields
from fairlead.server.routes.request import Request, Response

JSON = "application/json"
EVENTS = "text/event-stream"
VERSION = "/v1"
ERRORS_OF_JOBS = (400, 404, 408, 409, 413, 429, 500, 502, 503, 504)
PARAMETER = re.compile(r"\{(\w+)\}")


class Permission(Enum):
    """Who may use a route. `origin` describes the check of `Host` and `Origin`.

    - `PROBE`: no key is needed, and any `Host` and `Origin` are accepted
    - `OPEN`: no key is needed
    - `KEY`: an API key is needed, if any are configured
    - `STRICT`: as `KEY`, but `Host` and `Origin` are checked strictly, and no page of another server may
    - `OPERATOR`: as `STRICT`, and a key needs the role operator
    - `ALL_MODELS`: as `OPERATOR`, but no key that is limited to some models
    - `ADMIN`: as `STRICT`, and a key needs the role admin, which is for all models
    """

    PROBE = auto()
    OPEN = auto()
    KEY = auto()
    STRICT = auto()
    OPERATOR = auto()
    ALL_MODELS = auto()
    ADMIN = auto()

    @property
    def role(self) -> Role:
        """The role that a key needs."""
        return _ROLES.get(self, "user")

    @property
    def is_strict(self) -> bool:
        """Whether `Host` and `Origin` are checked strictly."""
        return self is Permission.STRICT or self in _ROLES


_ROLES: dict[Permission, Role] = {
    Permission.OPERATOR: "operator",
    Permission.ALL_MODELS: "operator",
    Permission.ADMIN: "admin",
}
KEYLESS = frozenset({Permission.PROBE, Permission.OPEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What is served under a method and a path.

    method: The method. HEAD is served where GET is, and OPTIONS everywhere.
    path: The path, with parameters in braces, which may contain slashes.
    view: A method of one of the objects in `Views`; None: `GenerationViews` serves the dialect.
    dialect: The dialect of a route that a model answers.
    permission: Who may use it.
    is_direct: Our own listener calls the view without Quart.
    is_versionless: It is also served without `/v1`.
    tag: Groups the operations in the documents; None: it is not documented.
    summary: What it does, in the documents.
    body: The type of the body; None: it has none, or only a form.
    form: The schema of a form, which the body may be instead of JSON, or is without `body`.
    answer: The type of a successful response.
    error: The type of the body of an error.
    status: The status of a successful response.
    media: The media type of a successful response.
    may_stream: A successful response may also be a stream of events.
    errors: Statuses of errors besides those that follow from `body` and `permission`.
    states: Statuses of errors with a response of the same form as a successful one.
    refused_fields: Fields of other servers that models of our engine refuse.
    query: The parameters of the query, with their descriptions.
    """

    method: str
    path: str
    view: Callable[[Any, Request], Awaitable[Response]] | None = None
    dialect: RelayDialect | None = None
    permission: Permission
    is_direct: bool = False
    is_versionless: bool = False
    tag: str | None = None
    summary: str = ""
    body: Any = None
    form: dict[str, Any] | None = None
    answer: Any = None
    error: Any = shapes.ErrorAnswer
    status: int = 200
    media: str = JSON
    may_stream: bool = False
    errors: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    refused_fields: Fields | None = None
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        """The names of the path's parameters."""
        return PARAMETER.findall(self.path)

    @property
    def error_statuses(self) -> list[int]:
        """The statuses of the errors that the route may respond with."""
        statuses = {*self.errors}
        if self.body is not None or self.form is not None:
            statuses |= {400, 408, 413, 415}
        if self.permission is not Permission.PROBE:
            statuses.add(403)
        if self.permission not in KEYLESS:
            statuses.add(401)
        return sorted(statuses)


def group(tag: str, *routes: Route) -> tuple[Route, ...]:
    """Return routes that are documented under a tag."""
    return tuple(replace(route, tag=tag) for route in routes)


def dialect_route(dialect: RelayDialect, summary: str, *, is_versionless: bool = False) -> Route:
    """Return the route of a dialect."""
    return Route(
        method="POST",
        path=dialect.path,
        dialect=dialect,
        permission=Permission.KEY,
        is_direct=True,
        is_versionless=is_versionless,
        tag="generate",
        summary=summary,
        body=dialect.body_type,
        answer=dialect.answer_type,
        errors=ERRORS_OF_JOBS,
        refused_fields=dialect.refused_fields,
    )
