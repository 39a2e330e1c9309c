"""OpenAI's conversations: items that responses continue, and to which they add theirs when they end.

A conversation is kept as a response is, by the same rules: for its key and user, within the same bounds, in
memory or in the store, for `responses.ttl` after its last change. It is one document. Its items are not
decoded when others are added.
"""

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead.base.errors import InvalidRequest, NotFound, NotServed, quoted
from fairlead.dialects.body import invalid_field
from fairlead.dialects.responses.items import InputItem, check_items
from fairlead.dialects.responses.responses import Metadata
from fairlead.dialects.responses.shapes import (
    ConversationObject,
    DeletedConversation,
)
from fairlead.generation.offload import LARGE_BODY_BYTES
from fairlead.server.responses.archive import ResponseArchive
from fairlead.server.responses.items import (
    CONVERSATION_PREFIX,
    PREFIXES,
    Item,
    decode_items,
    listed_item,
    page_of,
    page_query,
)
from fairlead.server.responses.store import StoredResponse
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_caller import owner_so_far, tenant_so_far
from fairlead.server.routes.request_reader import RequestReader

ADDED_AT_ONCE = 20
"""The most items of a request, as in OpenAI's API."""
TURNS_REMEMBERED = 64
"""Responses whose items were added; one that is added again, because an answer was lost, changes nothing."""

_OFF = "conversations need stored responses: `responses.store`, and `responses.inStore` with several fronts"

Items = Annotated[list[dict[str, Any]], Meta(max_length=ADDED_AT_ONCE)]


class CreateConversationRequest(msgspec.Struct, frozen=True):
    """`POST /v1/conversations`. `items`: its first items."""

    items: Items | None = None
    metadata: Metadata | None = None


class UpdateConversationRequest(msgspec.Struct, frozen=True):
    """`POST /v1/conversations/{conversation_id}`. `metadata`: replaces the texts of the client."""

    metadata: Metadata


class AddItemsRequest(msgspec.Struct, frozen=True):
    """`POST /v1/conversations/{conversation_id}/items`. `items`: what is added at the end."""

    items: Items


class KeptConversation(msgspec.Struct):
    """A conversation as it is kept.

    id: its id.
    created_at: its time, in seconds since 1970.
    metadata: texts of the client.
    items: its items, each with an id.
    turns: the ids of the latest responses whose items were added.
    """

    id: str
    created_at: int
    metadata: dict[str, str] = {}
    items: list[msgspec.Raw] = []
    turns: list[str] = []

    def shown(self) -> ConversationObject:
        """Return the conversation as clients see it."""
        return ConversationObject(self.id, "conversation", self.created_at, self.metadata)


class _Turn(msgspec.Struct):
    status: str
    output: list[msgspec.Raw]


_decode = msgspec.json.Decoder(KeptConversation).decode
_decode_turn = msgspec.json.Decoder(_Turn).decode
_encode = msgspec.json.Encoder().encode
_create_decoder = msgspec.json.Decoder(CreateConversationRequest)
_update_decoder = msgspec.json.Decoder(UpdateConversationRequest)
_add_decoder = msgspec.json.Decoder(AddItemsRequest)


def with_turn(document: bytes, response_id: str, given: bytes, answer: bytes) -> bytes:
    """Return a conversation with the input and output items of a response, unless it has them. Pure."""
    turn = _decode_turn(answer)
    conversation = _decode(document)
    if turn.status not in ("completed", "incomplete") or response_id in conversation.turns:
        return document
    conversation.items += [_raw(item) for item in decode_items(given)]
    conversation.items += turn.output
    conversation.turns = [*conversation.turns, response_id][-TURNS_REMEMBERED:]
    return _encode(conversation)


def items_of(document: bytes) -> list[Item]:
    """Return the items of a conversation."""
    return [msgspec.json.decode(item) for item in _decode(document).items]


class ConversationRoutes:
    """The views of `/v1/conversations`.

    reader: reads requests.
    archive: keeps the conversations.
    is_on: whether anything is kept.
    max_bytes: the most bytes of one conversation.
    """

    def __init__(
        self, reader: RequestReader, archive: ResponseArchive, *, is_on: bool, max_bytes: int
    ) -> None:
        self._reader = reader
        self._archive = archive
        self._is_on = is_on
        self._max_bytes = max_bytes
        archive.with_turn = with_turn

    async def create_conversation(self, request: Request) -> Response:
        """Make a conversation."""
        if not self._is_on:
            raise NotServed(_OFF)
        body = await self._reader.read(request, _create_decoder)
        conversation = KeptConversation(
            f"{CONVERSATION_PREFIX}{secrets.token_hex(16)}",
            int(time.time()),
            body.metadata or {},
            [_raw(item) for item in _checked(body.items or [])],
        )
        kept = StoredResponse(conversation.id, owner_so_far(request), tenant_so_far(request))
        if not await self._archive.add(kept, self._bounded(_encode(conversation))):
            raise invalid_field("items", "are larger than what is kept (responses.maxBytes)")
        return json_response(conversation.shown())

    async def conversation(self, request: Request) -> Response:
        """Return a conversation."""
        return json_response(_decode(await self._find(request)).shown())

    async def update_conversation(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        body = await self._reader.read(request, _update_decoder)

        def change(conversation: KeptConversation) -> None:
            conversation.metadata = body.metadata

        return json_response((await self._change(request, change)).shown())

    async def delete_conversation(self, request: Request) -> Response:
        """Remove a conversation. Responses that have continued it stay."""
        await self._find(request)
        name = request.path_parameters["conversation_id"]
        await self._archive.remove(name, owner_so_far(request))
        return json_response(DeletedConversation(name, "conversation.deleted", deleted=True))

    async def add_items(self, request: Request) -> Response:
        """Add items at the end of a conversation; return them."""
        body = await self._reader.read(request, _add_decoder)
        added = _checked(body.items)

        def change(conversation: KeptConversation) -> None:
            conversation.items += map(_raw, added)

        await self._change(request, change)
        return json_response(page_of(added, order="asc", after=None, limit=len(added)))

    async def conversation_items(self, request: Request) -> Response:
        """Return a page of a conversation's items."""
        items = await self._items(request)
        return json_response(page_of(items, **page_query(request)))

    async def conversation_item(self, request: Request) -> Response:
        """Return one item of a conversation."""
        item_id = request.path_parameters["item_id"]
        for item in await self._items(request):
            if item["id"] == item_id:
                return json_response(item)
        raise _no_item(item_id)

    async def delete_item(self, request: Request) -> Response:
        """Remove an item of a conversation; return the conversation."""
        item_id = request.path_parameters["item_id"]

        def change(conversation: KeptConversation) -> None:
            kept = [item for item in conversation.items if msgspec.json.decode(item)["id"] != item_id]
            if len(kept) == len(conversation.items):
                raise _no_item(item_id)
            conversation.items = kept

        return json_response((await self._change(request, change)).shown())

    async def _items(self, request: Request) -> list[Item]:
        document = await self._find(request)
        if len(document) > LARGE_BODY_BYTES:
            tenant = tenant_so_far(request)
            return await self._reader.jobs.offload.in_thread(tenant, items_of, document)
        return items_of(document)

    async def _find(self, request: Request) -> bytes:
        """Return the conversation in the path. Those of other keys and users are reported as not found."""
        name = request.path_parameters["conversation_id"]
        return await find_conversation(self._archive, name, owner_so_far(request))

    async def _change(self, request: Request, change: Callable[[KeptConversation], None]) -> KeptConversation:
        """Change the conversation in the path, also where another front changes it at the same time."""

        def changed(document: bytes) -> bytes:
            conversation = _decode(document)
            change(conversation)
            return self._bounded(_encode(conversation))

        name = request.path_parameters["conversation_id"]
        document = None
        if name.startswith(CONVERSATION_PREFIX):
            document = await self._archive.change(name, owner_so_far(request), changed)
        if document is None:
            raise _no_conversation(name)
        return _decode(document)

    def _bounded(self, document: bytes) -> bytes:
        if len(document) > self._max_bytes:
            reason = f"the conversation would be longer than {self._max_bytes} bytes (limits.bodyBytes)"
            raise invalid_field("items", reason)
        return document


async def find_conversation(archive: ResponseArchive, name: str, owner: str) -> bytes:
    """Return the document of a conversation. Raises `NotFound` and `StoreUnavailable`."""
    found = await archive.find(name, owner) if name.startswith(CONVERSATION_PREFIX) else None
    if found is None:
        raise _no_conversation(name)
    return found.document


def _no_conversation(name: str) -> NotFound:
    return NotFound(f"no conversation {quoted(name)} of yours is kept here", param="conversation")


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"the conversation has no item {quoted(item_id)}")


def _checked(items: list[dict[str, Any]]) -> list[Item]:
    """Return a client's items in the form of lists, each with a new id. Raises `InvalidRequest`."""
    try:
        check_items(msgspec.convert(items, list[InputItem]), "items")
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"items: {error}", param="items") from error
    return [_with_id(item) for item in items]


def _with_id(item: Item) -> Item:
    prefix = PREFIXES.get(item.get("type") or "message", "item")
    return listed_item({**item, "id": None}, f"{prefix}_{secrets.token_hex(16)}")


def _raw(item: Item) -> msgspec.Raw:
    """Return an item to keep, with an id."""
    return msgspec.Raw(_encode(item if item.get("id") and "status" in item else _with_id(item)))
