"""A server's usage on a terminal: `fairlead usage`."""

import sys
import time
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec

from fairlead.base.errors import printable
from fairlead.server.console.client import Client

By = Literal["team", "user", "key", "model", "route", "outcome", "batch"]
GROUPS: dict[str, str] = {"team": "project_id", "user": "user_id", "key": "api_key_id", "model": "model"} | {
    "route": "route",
    "outcome": "outcome",
    "batch": "batch",
}
DAY_S = 86_400
_KINDS = ("completions", "embeddings", "audio_speeches")
_BUCKETS = 31
_SUMS = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens", "seat_seconds")
_TITLES = ("REQUESTS", "PROMPT", "CACHED", "GENERATED", "SEAT S")


def usage(client: Client, *, by: By, days: int, as_json: bool) -> int:
    """Print what was used in the last days, in sums by what `by` names."""
    now = int(time.time())
    start = now // DAY_S * DAY_S - (days - 1) * DAY_S
    totals: dict[str, dict[str, float]] = {}
    for kind in _KINDS:
        for result in _results(client, f"/v1/organization/usage/{kind}", start, now + 1, GROUPS[by]):
            total = totals.setdefault(_name(result[GROUPS[by]]), dict.fromkeys(_SUMS, 0))
            for name in _SUMS:
                total[name] += result.get(name) or 0
    rows = sorted(totals.items(), key=lambda item: -item[1]["num_model_requests"])
    if as_json:
        document = [{by: name, **total} for name, total in rows]
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(by.upper(), overflow="fold")
    for title in _TITLES:
        table.add_column(title, justify="right")
    for name, total in rows:
        table.add_row(printable(name) or "—", *(f"{total[each]:,.0f}" for each in _SUMS))
    Console().print(table)
    return 0


def _name(value: str | bool | None) -> str:
    if isinstance(value, bool):
        return "batches" if value else "others"
    return value or ""


def _results(client: Client, path: str, start: int, end: int, group: str) -> list[dict[str, Any]]:
    """Return the results of all buckets, page after page."""
    found: list[dict[str, Any]] = []
    query = {"start_time": start, "end_time": end, "limit": _BUCKETS, "group_by": group}
    while True:
        page = msgspec.json.decode(client.get(f"{path}?{urlencode(query)}"))
        found += (result for bucket in page["data"] for result in bucket["results"])
        if not page["has_more"]:
            return found
        query["page"] = page["next_page"]
