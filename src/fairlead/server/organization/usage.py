"""The views of usage and costs, in the forms of OpenAI's administration API, and as CSV.

An operator's key reads all usage, for some models that of these models; any other key reads its own, that of
its user, and of the users that it may name.
"""

import csv
import io
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from fairlead.base.config import ApiKey
from fairlead.dialects.body import invalid_field
from fairlead.generation.services import Services
from fairlead.router.quotas.access import owner_of
from fairlead.server.organization.keys import store_of
from fairlead.server.organization.schemas import PROJECT, UsageBucket, UsagePage
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.store.database import MINUTES_DAYS
from fairlead.store.records import HOUR_S, MINUTE_S, NANO, UsageCounts, UsageKey, UsageQuery, UsageRow

DAY_S = 86_400
WIDTHS = {"1m": MINUTE_S, "1h": HOUR_S, "1d": DAY_S}
LIMITS = {
    "1m": (60, 1440),
    "1h": (24, 168),
    "1d": (7, 31),
}  # the usual and the greatest number of buckets, as at OpenAI
COST_LIMITS = (7, 180)
LATEST = 253_402_300_799  # the last second of the year 9999
VALUES_AT_MOST = 100

# The names of columns in requests, and in the store; None: of what there is only one kind.
GROUPS: dict[str, str | None] = {
    "project_id": "team",
    "user_id": "user",
    "api_key_id": "key",
    "model": "model",
    "batch": "batch",
    "service_tier": None,
    "api_source": None,
    "route": "route",
    "outcome": "outcome",
}
COST_GROUPS: dict[str, str | None] = {
    "project_id": "team",
    "line_item": "model",
    "api_key_id": "key",
    "user_id": "user",
    "batch": "batch",
    "api_source": None,
}
FILTERS = {
    "project_ids": "team",
    "user_ids": "user",
    "api_key_ids": "key",
    "models": "model",
    "line_items": "model",
}

_EMBEDDING = ("/embeddings", "/api/embed", "/rerank", "/score")
_SPEECH = ("/audio/speech",)
_OTHER = ("/audio/", "/images/", "/moderations", "/upstream/")


class UsageRoutes:
    """The views of `/v1/organization/usage/…` and `/v1/organization/costs`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def completions(self, request: Request) -> Response:
        """Return the usage of routes that generate text."""
        return await self._usage(request, "completions")

    async def embeddings(self, request: Request) -> Response:
        """Return the usage of routes that compute embeddings and scores."""
        return await self._usage(request, "embeddings")

    async def audio_speeches(self, request: Request) -> Response:
        """Return the usage of the route that speaks texts."""
        return await self._usage(request, "audio_speeches")

    async def costs(self, request: Request) -> Response:
        """Return what was spent on models with a price, by day."""
        parameters = _Parameters(request)
        if parameters.one("bucket_width", "1d") != "1d":
            raise invalid_field("bucket_width", "must be 1d")
        groups = parameters.groups(COST_GROUPS)
        buckets, more = await self._buckets(request, parameters, "1d", COST_LIMITS, COST_GROUPS, groups, None)
        kind = "organization.costs.result"
        return _respond(request, buckets, more, lambda row: _cost(kind, row, groups))

    async def _usage(self, request: Request, kind: str) -> Response:
        parameters = _Parameters(request)
        width = parameters.one("bucket_width", "1d")
        if width not in WIDTHS:
            raise invalid_field("bucket_width", f"must be {', '.join(WIDTHS)}")
        groups = parameters.groups(GROUPS)
        buckets, more = await self._buckets(request, parameters, width, LIMITS[width], GROUPS, groups, kind)
        return _respond(request, buckets, more, lambda row: _result(kind, row, groups))

    async def _buckets(
        self,
        request: Request,
        parameters: "_Parameters",
        width: str,
        limits: tuple[int, int],
        known: Mapping[str, str | None],
        groups: list[str],
        kind: str | None,
    ) -> tuple[dict[tuple[int, int], list[UsageRow]], int | None]:
        """Return the rows of each bucket by its start and end, and the start of the next page.

        width: of a bucket.
        limits: the usual and the greatest number of buckets.
        known: the columns by the names of groups.
        groups: those that are kept apart.
        kind: of the routes that count; None: all.
        """
        width_s = WIDTHS[width]
        limit = parameters.number("limit", limits[0], 1, limits[1])
        start = parameters.number("start_time", None, 0, LATEST) // width_s * width_s
        if (page := parameters.one("page", "")) != "":
            start = _read_page(page, start, width_s)
        end = parameters.number("end_time", min(int(time.time()) + 1, LATEST), 0, LATEST)
        if width_s < HOUR_S and start < time.time() - MINUTES_DAYS * DAY_S:
            raise invalid_field(
                "start_time", f"must be in the last {24 * MINUTES_DAYS} hours: minutes are not kept longer"
            )
        if end <= start:
            raise invalid_field("end_time", "must be after start_time")
        count = -(-(end - start) // width_s)
        shown = min(count, limit)
        query = UsageQuery(
            start=start,
            end=start + shown * width_s,
            width_s=width_s,
            group_by=tuple(dict.fromkeys((*_columns(known, groups), "route"))),
            filters=self._filters(request.api_key, parameters),
            own=_own(request.api_key),
        )
        rows = await store_of(self._services.store).usage(query)
        buckets: dict[tuple[int, int], list[UsageRow]] = {
            (at, at + width_s): [] for at in range(start, query.end, width_s)
        }
        kept = set(_columns(known, groups))
        for key, counts in _of_kind(rows, kind, kept):
            buckets[key.at, key.at + width_s].append((key, counts))
        return buckets, query.end if count > shown else None

    def _filters(self, api_key: ApiKey | None, parameters: "_Parameters") -> dict[str, tuple[str | int, ...]]:
        """Return the values that count, by column."""
        filters: dict[str, tuple[str | int, ...]] = {}
        for name, column in FILTERS.items():
            if values := parameters.several(name):
                wanted = ["" if value == PROJECT and column == "team" else value for value in values]
                earlier = filters.get(column, wanted)  # two names of one column: what both name
                filters[column] = tuple(value for value in wanted if value in earlier)
        models = self._services.scope_of(api_key).models
        if models is not None:
            filters["model"] = tuple(models & set(filters.get("model", models)))
        if (batch := parameters.one("batch", "")) != "":
            if batch not in ("true", "false"):
                raise invalid_field("batch", "must be true or false")
            filters["batch"] = (int(batch == "true"),)
        return filters


class _Parameters:
    """The query of a request. Names of lists may end in `[]`, as OpenAI's clients send them."""

    def __init__(self, request: Request) -> None:
        pairs = parse_qsl(request.query_string.decode(errors="replace"), keep_blank_values=True)
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name.removesuffix("[]"), []).append(value)

    def one(self, name: str, default: str) -> str:
        """Return a parameter's value."""
        return self._values.get(name, [default])[0]

    def several(self, name: str) -> list[str]:
        """Return all values of a list."""
        values = self._values.get(name, [])
        if len(values) > VALUES_AT_MOST:
            raise invalid_field(name, f"must have at most {VALUES_AT_MOST} values")
        return values

    def number(self, name: str, default: int | None, least: int, most: int) -> int:
        """Return a whole number in a range."""
        text = self.one(name, "" if default is None else str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            raise invalid_field(name, f"must be a whole number from {least} to {most}")
        return int(text)

    def groups(self, known: Mapping[str, str | None]) -> list[str]:
        """Return the names of `group_by`, each once."""
        names = list(dict.fromkeys(self.several("group_by")))
        for name in names:
            if name not in known:
                raise invalid_field("group_by", f"must be of {', '.join(known)}, not {name[:40]!r}")
        return names


def _columns(known: Mapping[str, str | None], groups: Iterable[str]) -> list[str]:
    """Return the columns of groups in the store."""
    return [column for name in groups if (column := known[name]) is not None]


def _own(api_key: ApiKey | None) -> tuple[str, str] | None:
    """Return the key and user whose usage a caller may read; None: all."""
    if api_key is None or api_key.has_role("operator"):
        return None
    return owner_of(api_key), api_key.user or ""


def _of_kind(rows: Iterable[UsageRow], kind: str | None, kept: set[str]) -> Iterable[UsageRow]:
    """Return the rows of routes of a kind, summed up over all columns but `kept`."""
    sums: dict[UsageKey, UsageCounts] = {}
    for row, counts in rows:
        if kind is None or kind_of(row.route) == kind:
            key = row if "route" in kept else msgspec.structs.replace(row, route="")
            sums[key] = sums[key] + counts if key in sums else counts
    return sums.items()


def kind_of(route: str) -> str:
    """Return the kind of usage that a route belongs to."""
    if route.endswith(_SPEECH):
        return "audio_speeches"
    if any(part in route for part in _EMBEDDING):
        return "embeddings"
    return "" if any(part in route for part in _OTHER) else "completions"


def _result(kind: str, row: UsageRow, groups: list[str]) -> dict[str, Any]:
    """Return one result in OpenAI's form, with further members."""
    key, counts = row
    result: dict[str, Any] = {"object": f"organization.usage.{kind}.result"}
    if kind == "audio_speeches":
        result["characters"] = None  # not counted: other servers speak
    else:
        result["input_tokens"] = counts.prompt_tokens
    if kind == "completions":
        result |= {
            "output_tokens": counts.generated_tokens,
            "input_cached_tokens": counts.cached_tokens,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
        }
    return (
        result
        | {"num_model_requests": counts.requests}
        | _grouped(key, groups, GROUPS)
        | {"seat_seconds": counts.seat_ms / 1000, "wait_seconds": counts.wait_ms / 1000}
    )


def _cost(kind: str, row: UsageRow, groups: list[str]) -> dict[str, Any]:
    key, counts = row
    amount = {"value": counts.cost_nano / NANO, "currency": "usd"}
    return {"object": kind, "amount": amount} | _grouped(key, groups, COST_GROUPS)


def _grouped(
    key: UsageKey, groups: list[str], known: Mapping[str, str | None]
) -> dict[str, str | bool | None]:
    """Return the values of the groups; null for all others, and for what a row does not have."""
    values: dict[str, str | bool | None] = dict.fromkeys(known)
    for name in groups:
        column = known[name]
        values[name] = None if column is None else getattr(key, column)
        if values[name] == "":
            values[name] = PROJECT if name == "project_id" else None
    return values


def _respond(
    request: Request,
    buckets: Mapping[tuple[int, int], list[UsageRow]],
    more: int | None,
    result_of: Any,
) -> Response:
    data = [
        UsageBucket(start_time=start, end_time=end, results=[result_of(row) for row in rows])
        for (start, end), rows in buckets.items()
    ]
    next_page = None if more is None else f"page_{more}"
    if "text/csv" in request.headers.get("Accept", ""):
        headers = {"Content-Type": "text/csv; charset=utf-8", "X-Content-Type-Options": "nosniff"}
        return Response(_csv(data), 200, headers | ({} if next_page is None else {"X-Next-Page": next_page}))
    return json_response(UsagePage(data=data, has_more=more is not None, next_page=next_page))


def _csv(buckets: list[UsageBucket]) -> bytes:
    """Return a line for each result. Text that a spreadsheet would take for a formula begins with a quote."""
    lines = [
        {"start_time": bucket.start_time, "end_time": bucket.end_time}
        | {
            name: value["value"] if isinstance(value, dict) else value
            for name, value in result.items()
            if name != "object"
        }
        for bucket in buckets
        for result in bucket.results
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["start_time", "end_time"])
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return text.getvalue().encode()


def _cell(value: object) -> object:
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def _read_page(page: str, start: int, width_s: int) -> int:
    text = page.removeprefix("page_")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise invalid_field("page", "must be the next_page of an earlier response")
    found = int(text)
    if not start <= found <= LATEST or found % width_s:
        raise invalid_field("page", "does not belong to this start_time and bucket_width")
    return found
