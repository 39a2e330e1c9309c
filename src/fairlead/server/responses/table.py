"""The rows of the route table for OpenAI's Responses and conversations."""

from dataclasses import replace
from functools import partial
from typing import Any

from fairlead.dialects.responses.compaction import CompactionDialect
from fairlead.dialects.responses.responses import InputTokensDialect, ResponsesDialect
from fairlead.dialects.responses.shapes import (
    ConversationObject,
    DeletedConversation,
    DeletedResponse,
    InputItemList,
    ResponseObject,
)
from fairlead.server.responses.conversations import (
    AddItemsRequest,
    ConversationRoutes,
    CreateConversationRequest,
    UpdateConversationRequest,
)
from fairlead.server.responses.routes import ResponseRoutes
from fairlead.server.routes.route import Permission, Route, dialect_route

_PAGE_QUERY = {
    "after": "The id of the item before the first one to return.",
    "limit": "Maximum number of items, 1 to 100. Default: 20.",
    "order": "asc, or desc: the last one first. Default: desc.",
}

_kept = partial(Route, permission=Permission.KEY, is_versionless=True)

RESPONSE_ROUTES = (
    replace(
        dialect_route(
            ResponsesDialect(), "Create a response in OpenAI's Responses API.", is_versionless=True
        ),
        view=ResponseRoutes.create,
    ),
    replace(
        dialect_route(
            InputTokensDialect(), "Count the tokens of the input of a response.", is_versionless=True
        ),
        view=ResponseRoutes.count,
    ),
    replace(
        dialect_route(
            CompactionDialect(),
            "Shorten a conversation: its user's messages, and a summary by the model for later requests.",
            is_versionless=True,
        ),
        view=ResponseRoutes.compact,
    ),
    _kept(
        method="GET",
        path="/v1/responses/{response_id}",
        view=ResponseRoutes.retrieve,
        summary="Return a kept response of the same key and user, as it is now.",
        answer=ResponseObject,
        errors=(400, 404, 503),
        query={
            "stream": "true: the events of a response that was created with `background` and `stream`.",
            "starting_after": "The sequence number of the last event that the client has. Default: none.",
        },
    ),
    _kept(
        method="DELETE",
        path="/v1/responses/{response_id}",
        view=ResponseRoutes.delete,
        summary="Remove a kept response of the same key and user. One in progress is cancelled.",
        answer=DeletedResponse,
        errors=(404, 503),
    ),
    _kept(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        view=ResponseRoutes.cancel_response,
        summary="Cancel a response in the background of the same key and user, and return it.",
        answer=ResponseObject,
        errors=(400, 404, 503),
    ),
    _kept(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        view=ResponseRoutes.input_items,
        summary="List the input of a kept response of the same key and user, without that of earlier ones.",
        answer=InputItemList,
        errors=(400, 404, 503),
        query=_PAGE_QUERY,
    ),
    _kept(
        method="POST",
        path="/v1/conversations",
        view=ConversationRoutes.create_conversation,
        summary="Make a conversation, which responses continue and add their items to.",
        body=CreateConversationRequest,
        answer=ConversationObject,
        errors=(501, 503),
    ),
    _kept(
        method="GET",
        path="/v1/conversations/{conversation_id}",
        view=ConversationRoutes.conversation,
        summary="Return a conversation of the same key and user, without its items.",
        answer=ConversationObject,
        errors=(404, 503),
    ),
    _kept(
        method="POST",
        path="/v1/conversations/{conversation_id}",
        view=ConversationRoutes.update_conversation,
        summary="Replace the metadata of a conversation of the same key and user.",
        body=UpdateConversationRequest,
        answer=ConversationObject,
        errors=(404, 503),
    ),
    _kept(
        method="DELETE",
        path="/v1/conversations/{conversation_id}",
        view=ConversationRoutes.delete_conversation,
        summary="Remove a conversation of the same key and user. Its responses stay.",
        answer=DeletedConversation,
        errors=(404, 503),
    ),
    _kept(
        method="POST",
        path="/v1/conversations/{conversation_id}/items",
        view=ConversationRoutes.add_items,
        summary="Add items to a conversation of the same key and user, and return them.",
        body=AddItemsRequest,
        answer=InputItemList,
        errors=(404, 503),
    ),
    _kept(
        method="GET",
        path="/v1/conversations/{conversation_id}/items",
        view=ConversationRoutes.conversation_items,
        summary="List the items of a conversation of the same key and user.",
        answer=InputItemList,
        errors=(400, 404, 503),
        query=_PAGE_QUERY,
    ),
    _kept(
        method="GET",
        path="/v1/conversations/{conversation_id}/items/{item_id}",
        view=ConversationRoutes.conversation_item,
        summary="Return an item of a conversation of the same key and user.",
        answer=dict[str, Any],
        errors=(404, 503),
    ),
    _kept(
        method="DELETE",
        path="/v1/conversations/{conversation_id}/items/{item_id}",
        view=ConversationRoutes.delete_item,
        summary="Remove an item of a conversation of the same key and user; return the conversation.",
        answer=ConversationObject,
        errors=(404, 503),
    ),
)
