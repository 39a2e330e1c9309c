"""The rows of the route table for OpenAI's Responses."""

from dataclasses import replace

from fairlead.dialects.responses.responses import InputTokensDialect, ResponsesDialect
from fairlead.dialects.responses.shapes import DeletedResponse, InputItemList, ResponseObject
from fairlead.server.responses.routes import ResponseRoutes
from fairlead.server.routes.route import Permission, Route, dialect_route

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
    Route(
        method="GET",
        path="/v1/responses/{response_id}",
        view=ResponseRoutes.retrieve,
        permission=Permission.KEY,
        is_versionless=True,
        summary="Return a kept response of the same key and user, as it is now.",
        answer=ResponseObject,
        errors=(400, 404),
        query={
            "stream": "true: the events of a response that was created with `background` and `stream`.",
            "starting_after": "The sequence number of the last event that the client has. Default: none.",
        },
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{response_id}",
        view=ResponseRoutes.delete,
        permission=Permission.KEY,
        is_versionless=True,
        summary="Remove a kept response of the same key and user. One in progress is cancelled.",
        answer=DeletedResponse,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        view=ResponseRoutes.cancel_response,
        permission=Permission.KEY,
        is_versionless=True,
        summary="Cancel a response in the background of the same key and user, and return it.",
        answer=ResponseObject,
        errors=(400, 404),
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        view=ResponseRoutes.input_items,
        permission=Permission.KEY,
        is_versionless=True,
        summary="List the input of a kept response of the same key and user, without that of earlier ones.",
        answer=InputItemList,
        errors=(400, 404),
        query={
            "after": "The id of the item before the first one to return.",
            "limit": "Maximum number of items, 1 to 100. Default: 20.",
            "order": "asc, or desc: the last one first. Default: desc.",
        },
    ),
)
