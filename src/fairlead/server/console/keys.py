"""Keys of a server's store on a terminal: `fairlead keys`. All changes are made by the server."""

import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from fairlead.base.errors import printable
from fairlead.server.console.client import Client, ServerError

PATH = "/v1/organization/api_keys"
MAX_EXPORT_BYTES = 64 * 1024 * 1024
_PAGE = 100
_LITELLM_HASH = re.compile(r"[0-9a-f]{64}")
_DAY = re.compile(r"(1d|24h)")
_MONTH = re.compile(r"(30d|31d|1mo)")
_ALL_MODELS = {"all-proxy-models", "all-team-models"}


def add(client: Client, *, settings: dict[str, Any], as_json: bool) -> int:
    """Make a key, and print its value, which is shown nowhere else."""
    _print_value(client.post(PATH, settings), as_json=as_json)
    return 0


def rotate(client: Client, *, key_id: str, overlap_s: float, as_json: bool) -> int:
    """Give a key another value, and print it."""
    reply = client.post(f"{_path(key_id)}/rotate", {"overlap_seconds": int(overlap_s)})
    _print_value(reply, as_json=as_json)
    return 0


def revoke(client: Client, *, key_id: str) -> int:
    """Revoke a key."""
    client.delete(_path(key_id))
    return 0


def show(client: Client, *, key_id: str, as_json: bool) -> int:
    """Print a key's settings."""
    reply = client.get(_path(key_id))
    if as_json:
        sys.stdout.write(reply.decode() + "\n")
        return 0
    for name, value in msgspec.json.decode(reply).items():
        if value not in (None, [], False) and name not in ("object", "owner"):
            print(f"{name}: {printable(_written(name, value))}")
    return 0


def list_keys(client: Client, *, team: str | None, as_json: bool) -> int:
    """Print the keys, one a line: id, team, user or name, role, value, and the end of its validity."""
    keys = list(_keys(client, team))
    if as_json:
        sys.stdout.write(msgspec.json.encode(keys).decode() + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("ID", "NAME", "TEAM", "USER", "ROLE", "VALUE", "EXPIRES"):
        table.add_column(title, overflow="fold")
    for key in keys:
        ends = "" if key["expires_at"] is None else _written("expires_at", key["expires_at"])
        names = (key["id"], key["name"], key["project_id"], key["user"] or "", key["role"])
        table.add_row(*map(printable, (*names, key["redacted_value"], ends)))
    Console().print(table)
    return 0


def import_keys(client: Client, *, file: Path) -> int:
    """Add the keys of LiteLLM's export. Their values stay valid: LiteLLM's hashes are the same as ours."""
    with file.open("rb") as source:
        content = source.read(MAX_EXPORT_BYTES + 1)
    try:
        found = from_litellm(content)
    except ValueError as error:
        raise ServerError(f"{file}: {error}") from None
    known = {key["id"] for key in _keys(client, None)}
    added = 0
    for settings, remarks in found:
        name = printable(settings["name"])
        if f"key-{settings['hash'].removeprefix('sha256:')[:16]}" in known:
            print(f"{name}: is there already")
            continue
        client.post(PATH, settings)
        added += 1
        print(f"{name}: added{''.join(f'; {remark}' for remark in remarks)}")
    print(f"{added} keys added")
    return 0


def from_litellm(content: bytes) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the settings of each key in an export, with remarks on what has no equivalent here.

    An export is the answer of LiteLLM's `/key/list?return_full_object=true` or `/spend/keys`: a list of keys,
    or an object with the list as `keys`. Keys that are blocked or have expired are left out. Raises
    `ValueError` for anything else.
    """
    if len(content) > MAX_EXPORT_BYTES:
        raise ValueError(f"has more than {MAX_EXPORT_BYTES} bytes")
    try:
        document = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    entries = document.get("keys") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("is no export of LiteLLM: a list of keys is missing (return_full_object=true)")
    return [_setting(entry, number) for number, entry in enumerate(entries) if not _is_over(entry)]


def _is_over(entry: dict[str, Any]) -> bool:
    ends = _time(entry.get("expires"))
    return bool(entry.get("blocked")) or (ends is not None and ends <= datetime.now(UTC))


def _setting(entry: dict[str, Any], number: int) -> tuple[dict[str, Any], list[str]]:
    token = entry.get("token")
    if not isinstance(token, str) or _LITELLM_HASH.fullmatch(token) is None:
        raise ValueError(f"key {number}: token: must be a hash of 64 hexadecimal digits")
    settings: dict[str, Any] = {
        "name": str(entry.get("key_alias") or entry.get("key_name") or token[:16])[:200],
        "hash": f"sha256:{token}",
        "redacted_value": str(entry.get("key_name") or "…")[:100],
    }
    remarks = []
    for theirs, ours in (
        ("team_id", "project_id"),
        ("user_id", "user"),
        ("rpm_limit", "requests_per_minute"),
        ("tpm_limit", "tokens_per_minute"),
        ("max_parallel_requests", "concurrent"),
    ):
        if (value := entry.get(theirs)) is not None:
            settings[ours] = value
    models = [model for model in entry.get("models") or () if model not in _ALL_MODELS]
    if models:
        settings["models"] = models
    if (ends := _time(entry.get("expires"))) is not None:
        settings["expires_in_seconds"] = max(1, int((ends - datetime.now(UTC)).total_seconds()))
    budget, span = entry.get("max_budget"), str(entry.get("budget_duration") or "")
    if budget is not None:
        if _DAY.fullmatch(span):
            settings["cost_per_day"] = budget
        elif _MONTH.fullmatch(span):
            settings["cost_per_month"] = budget
        else:
            remarks.append(
                f"its budget is for {span or 'ever'}, which is neither a day nor a month: left out"
            )
    return settings, remarks


def _time(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _keys(client: Client, team: str | None) -> Iterable[dict[str, Any]]:
    """Yield all keys, page after page."""
    after = None
    while True:
        query = {"limit": str(_PAGE)} | ({} if team is None else {"project_id": team})
        query |= {} if after is None else {"after": after}
        page = msgspec.json.decode(client.get(f"{PATH}?{urlencode(query)}"))
        yield from page["data"]
        if not page["has_more"]:
            return
        after = page["last_id"]


def _path(key_id: str) -> str:
    return f"{PATH}/{quote(key_id, safe='')}"


def _print_value(reply: bytes, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(reply.decode() + "\n")
        return
    key = msgspec.json.decode(reply)
    print(key["value"])
    print(f"{key['id']}: this value is shown once", file=sys.stderr)


def _written(name: str, value: object) -> str:
    if name.endswith("_at"):
        return datetime.fromtimestamp(int(str(value)), UTC).strftime("%Y-%m-%d %H:%M UTC")
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
