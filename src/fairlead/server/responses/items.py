"""The items of stored responses: a conversation as the history of its next turn, and one response's input."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from fairlead.base.errors import PreviousResponseNotFound, quoted
from fairlead.dialects.body import invalid_field
from fairlead.dialects.responses.shapes import InputItemList
from fairlead.server.responses.store import ResponseStore, StoredResponse

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class _Document(msgspec.Struct):
    status: str
    output: list[Item]


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_input = msgspec.json.Decoder(str | list[Item]).decode


def turns_before(
    store: ResponseStore, response_id: str, owner: str, now_s: float, *, max_bytes: int
) -> list[StoredResponse]:
    """Return the response that a request continues, after those which that one continues. Renews all.

    Raises `PreviousResponseNotFound`, and `InvalidRequest` for more than `max_bytes`.
    """
    turns: list[StoredResponse] = []
    size = 0
    previous: str | None = response_id
    while previous is not None:
        found = store.find(previous, owner, now_s)
        if found is None:
            missing = "" if previous == response_id else f", which {quoted(response_id)} continues,"
            message = f"previous_response_id: the response {quoted(previous)}{missing} was not found"
            raise PreviousResponseNotFound(message, param="previous_response_id")
        size += len(found.input) + len(found.document)
        if size > max_bytes:
            reason = f"the conversation is longer than {max_bytes} bytes (limits.bodyBytes)"
            raise invalid_field("previous_response_id", reason)
        turns.append(found)
        previous = found.previous
    turns.reverse()
    for turn in turns:
        if turn.has_ended:
            store.renew(turn, now_s)
    return turns


def history_of(turns: list[tuple[bytes, bytes]]) -> list[Item]:
    """Return the input and output items of turns, each given by its input and its response object.

    Raises `InvalidRequest` if one of them did not end with an answer.
    """
    items: list[Item] = []
    for given, document in turns:
        response = _decode_document(document)
        if response.status not in ("completed", "incomplete"):
            reason = f"a response with the status {response.status} cannot be continued"
            raise invalid_field("previous_response_id", reason)
        items += _items(given)
        items += response.output
    return items


def input_list(
    response: StoredResponse, *, order: Literal["asc", "desc"], after: str | None, limit: int
) -> InputItemList:
    """Return a page of a response's own input items, each with an id. Raises `InvalidRequest`."""
    items = list(_listed(response))
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


def _items(given: bytes) -> list[Item]:
    """Return the items of an input, which may be a text."""
    decoded = _decode_input(given) if given else []
    return [{"role": "user", "content": decoded}] if isinstance(decoded, str) else decoded


def _listed(response: StoredResponse) -> Iterator[Item]:
    """Yield the input items in the form of OpenAI's lists: with all members that clients may omit."""
    for index, item in enumerate(_items(response.input)):
        kind = item.get("type") or "message"
        digest = blake2b(f"{response.id}/input/{index}".encode(), digest_size=16).hexdigest()
        listed = {
            "id": f"{_PREFIXES.get(kind, 'item')}_{digest}",
            "status": "completed",
            **item,
            "type": kind,
        }
        listed["id"] = item.get("id") or listed["id"]
        if kind == "message" and isinstance(item.get("content"), str):
            if item.get("role") == "assistant":
                listed["content"] = [{"type": "output_text", "text": item["content"], "annotations": []}]
            else:
                listed["content"] = [{"type": "input_text", "text": item["content"]}]
        yield listed
