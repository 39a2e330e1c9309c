"""The items of stored responses: a conversation as the history of its next turn, and one response's input."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TypedDict

import msgspec

from fairlead.base.errors import PreviousResponseNotFound, quoted
from fairlead.dialects.body import invalid_field
from fairlead.dialects.responses.shapes import InputItemList
from fairlead.server.responses.archive import ResponseArchive
from fairlead.server.responses.store import StoredResponse
from fairlead.server.routes.request import Request

Item = dict[str, Any]
Turn = tuple[bytes, bytes]
"""An input and its response object, in JSON."""

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


CONVERSATION_PREFIX = "conv_"
MAX_LISTED = 100
_USUALLY_LISTED = 20
_MAX_DIGITS = 9


class PageQuery(TypedDict):
    """Which items of a list are wanted, as keyword arguments of `page_of`."""

    order: str
    after: str | None
    limit: int


class _Document(msgspec.Struct):
    status: str
    output: list[Item]


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_input = msgspec.json.Decoder(str | list[Item]).decode


async def turns_before(
    archive: ResponseArchive, response_id: str, owner: str, *, max_bytes: int
) -> list[StoredResponse]:
    """Return the response that a request continues, after those which that one continues. Renews all.

    Raises `PreviousResponseNotFound`, `StoreUnavailable`, and `InvalidRequest` for more than `max_bytes`.
    """
    is_response = not response_id.startswith(CONVERSATION_PREFIX)
    turns = await archive.chain(response_id, owner, max_bytes) if is_response else []
    missing = turns[-1].previous if turns else response_id
    if missing is not None:
        continued = "" if missing == response_id else f", which {quoted(response_id)} continues,"
        message = f"previous_response_id: the response {quoted(missing)}{continued} was not found"
        raise PreviousResponseNotFound(message, param="previous_response_id")
    turns.reverse()
    return turns


def history_of(turns: list[Turn]) -> list[Item]:
    """Return the input and output items of turns, each given by its input and its response object.

    Raises `InvalidRequest` if one of them did not end with an answer.
    """
    items: list[Item] = []
    for given, document in turns:
        response = _decode_document(document)
        if response.status not in ("completed", "incomplete"):
            reason = f"a response with the status {response.status} cannot be continued"
            raise invalid_field("previous_response_id", reason)
        items += decode_items(given)
        items += response.output
    return items


def input_items_of(response: StoredResponse) -> list[Item]:
    """Return a response's own input items, in the form of OpenAI's lists."""
    return list(_listed(response))


def page_query(request: Request) -> PageQuery:
    """Return what the query says about a page of items. Raises `InvalidRequest`."""
    limit = whole_number(request, "limit")
    if limit is not None and not 1 <= limit <= MAX_LISTED:
        raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
    order = request.query("order") or "desc"
    if order not in ("asc", "desc"):
        raise invalid_field("order", "must be asc or desc")
    return PageQuery(order=order, after=request.query("after"), limit=limit or _USUALLY_LISTED)


def whole_number(request: Request, name: str) -> int | None:
    """Return a number of the query, None if it is absent. Raises `InvalidRequest`."""
    text = request.query(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise invalid_field(name, "must be a whole number")
    return int(text)


def page_of(items: list[Item], *, order: str, after: str | None, limit: int) -> InputItemList:
    """Return a page of items, each of which has an id. Raises `InvalidRequest`."""
    items = list(items)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid_field("after", f"there is no item {quoted(after)}")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList("list", page, first_id, last_id, has_more=start + limit < len(items))


def decode_items(given: bytes) -> list[Item]:
    """Return the items of an input, which may be a text."""
    decoded = _decode_input(given) if given else []
    return [{"role": "user", "content": decoded}] if isinstance(decoded, str) else decoded


def _listed(response: StoredResponse) -> Iterator[Item]:
    """Yield the input items in the form of OpenAI's lists: with all members that clients may omit."""
    for index, item in enumerate(decode_items(response.input)):
        kind = item.get("type") or "message"
        digest = blake2b(f"{response.id}/input/{index}".encode(), digest_size=16).hexdigest()
        yield listed_item(item, f"{PREFIXES.get(kind, 'item')}_{digest}")


def listed_item(item: Item, item_id: str) -> Item:
    """Return an item in the form of OpenAI's lists, with this id unless it has one."""
    kind = item.get("type") or "message"
    listed = {"id": item_id, "status": "completed", **item, "type": kind}
    listed["id"] = item.get("id") or item_id
    if kind == "message" and isinstance(item.get("content"), str):
        if item.get("role") == "assistant":
            listed["content"] = [{"type": "output_text", "text": item["content"], "annotations": []}]
        else:
            listed["content"] = [{"type": "input_text", "text": item["content"]}]
    return listed
