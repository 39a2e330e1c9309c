"""The rows of the route table for files and batches."""

from functools import partial

from fairlead.server.batches.records import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from fairlead.server.batches.routes import BatchRoutes
from fairlead.server.routes.route import Permission, Route, group

_FORM = {
    "type": "object",
    "properties": {
        "purpose": {"type": "string", "const": "batch"},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"type": "string", "const": "created_at"},
        "expires_after[seconds]": {"type": "string", "pattern": "^[0-9]{1,9}$"},
    },
    "required": ["purpose", "file"],
}
_LIMIT = "Maximum number, 1 to {}. Default: {}."

_route = partial(Route, permission=Permission.KEY, is_versionless=True)

BATCH_ROUTES = group(
    "batches",
    _route(
        method="POST",
        path="/v1/files",
        view=BatchRoutes.upload,
        is_direct=True,
        summary="Upload the requests of a batch, one a line.",
        form=_FORM,
        answer=FileObject,
        errors=(429, 501, 503),
    ),
    _route(
        method="GET",
        path="/v1/files",
        view=BatchRoutes.list_files,
        summary="List the files of the same key and user.",
        answer=FileList,
        errors=(400, 501, 503),
        query={
            "purpose": "Only those with this purpose: batch or batch_output.",
            "limit": _LIMIT.format("10000", "10000"),
            "order": "asc, or desc: the newest first. Default: desc.",
            "after": "The id of the file before the first one to return.",
        },
    ),
    _route(
        method="GET",
        path="/v1/files/{file_id}",
        view=BatchRoutes.retrieve_file,
        summary="Describe a file of the same key and user.",
        answer=FileObject,
        errors=(404, 501, 503),
    ),
    _route(
        method="DELETE",
        path="/v1/files/{file_id}",
        view=BatchRoutes.delete_file,
        summary="Remove a file of the same key and user, unless a batch needs it that has not ended.",
        answer=DeletedFile,
        errors=(404, 409, 501, 503),
    ),
    _route(
        method="GET",
        path="/v1/files/{file_id}/content",
        view=BatchRoutes.file_content,
        summary="Return the contents of a file of the same key and user.",
        media="application/octet-stream",
        errors=(404, 501, 503),
    ),
    _route(
        method="POST",
        path="/v1/batches",
        view=BatchRoutes.create_batch,
        summary="Run the requests of a file in seats that nothing else needs, within 24 hours.",
        body=CreateBatchRequest,
        answer=BatchObject,
        errors=(404, 429, 501, 503),
    ),
    _route(
        method="GET",
        path="/v1/batches",
        view=BatchRoutes.list_batches,
        summary="List the batches of the same key and user, the newest first.",
        answer=BatchList,
        errors=(400, 501, 503),
        query={
            "limit": _LIMIT.format("100", "20"),
            "after": "The id of the batch before the first one to return.",
        },
    ),
    _route(
        method="GET",
        path="/v1/batches/{batch_id}",
        view=BatchRoutes.retrieve_batch,
        summary="Return how far a batch of the same key and user is.",
        answer=BatchObject,
        errors=(404, 501, 503),
    ),
    _route(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        view=BatchRoutes.cancel_batch,
        summary="Cancel a batch of the same key and user. The results that it has are kept.",
        answer=BatchObject,
        errors=(400, 404, 501, 503),
    ),
)
