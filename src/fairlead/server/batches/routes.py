"""The views of `/v1/files` and `/v1/batches`. Only the owner of an object sees it, whatever the role."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
import trio

from fairlead.base.errors import InvalidRequest, NotFound, NotServed, UploadFailed, quoted
from fairlead.base.formats.multipart import is_form
from fairlead.base.job import Form, FormPart
from fairlead.base.supervision import keep_running
from fairlead.dialects.body import invalid_field
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.router.quotas.access import Authenticator, owner_of
from fairlead.server.batches.execution import ENDPOINTS, BatchExecution
from fairlead.server.batches.records import (
    BatchList,
    BatchRecord,
    CreateBatchRequest,
    DeletedFile,
    FileList,
    FileRecord,
    Metadata,
    StoredBatch,
    batch_object,
    file_object,
)
from fairlead.server.batches.runner import BatchRunner, in_thread
from fairlead.server.batches.store import PIECE_BYTES, BatchStore
from fairlead.server.routes.media import INERT
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_caller import owner_so_far, tenant_so_far
from fairlead.server.routes.request_reader import RequestReader

DAY_S = 86_400
WINDOW = "24h"
MOST_NOTES, MOST_KEY_CHARS, MOST_VALUE_CHARS = 16, 64, 512
MOST_NAME_CHARS = 255
MOST_LISTED_FILES, MOST_LISTED_BATCHES, USUALLY_LISTED = 10_000, 100, 20
LEAST_EXPIRY_S = 3600

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = frozenset({"purpose", _ANCHOR, _SECONDS})
_MAX_DIGITS = 9

Result = TypeVar("Result")
Listed = TypeVar("Listed", FileRecord, StoredBatch)

_decoder = msgspec.json.Decoder(CreateBatchRequest)


class BatchRoutes:
    """The views, and the task that runs the batches of this process.

    reader: Reads requests, and has the jobs.
    pipeline: Answers the requests of batches.
    authenticator: Says whether the key of a batch is still valid.
    """

    def __init__(
        self, reader: RequestReader, pipeline: GenerationPipeline, authenticator: Authenticator
    ) -> None:
        self._reader = reader
        config = reader.jobs.services.config
        self._scope = trio.CancelScope()
        self._incoming: Counter[str] = Counter()  # bytes of uploads that are being written, by tenant
        self._store: BatchStore | None = None
        if config.batches.folder is not None:
            self._store = BatchStore(
                Path(config.batches.folder).expanduser(),
                tenant_bytes=config.batches.tenant_bytes,
                keep_s=config.batches.keep_days * DAY_S,
            )
            self._runner = BatchRunner(
                self._store,
                BatchExecution(reader.jobs, pipeline, authenticator),
                most_lines=config.batches.lines,
                most_line_bytes=config.limits.body_bytes,
            )

    async def run(self) -> None:
        """Run batches until `stop`."""
        if self._store is not None:
            with self._scope:
                await keep_running("batches", self._run, self._store)

    def stop(self) -> None:
        """End what `run` does. The batches go on in the next process."""
        self._scope.cancel()

    async def _run(self, store: BatchStore) -> None:
        await in_thread(store.prepare)
        await self._runner.run()

    # Files -------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Keep a file of requests."""
        store = self._open()
        if not is_form(request.headers.get("Content-Type", "")):
            raise InvalidRequest("a file is uploaded as multipart/form-data", param="Content-Type")
        form, values = await self._reader.uploads.receive(request, _FIELDS, _check_purpose)
        _check_purpose({"purpose": "", **values})
        expires_after_s = _expiry(values)
        part = _file_of(form)
        tenant = tenant_so_far(request)
        self._incoming[tenant] += part.size
        try:
            file = await self._call(store.new_file, tenant, self._incoming[tenant])
            try:
                await self._call(file.open)
                for start in range(part.start, part.start + part.size, PIECE_BYTES):
                    size = min(PIECE_BYTES, part.start + part.size - start)
                    await self._call(file.write, await form.contents.read(start, size))
                record = await self._call(
                    lambda: file.end(
                        owner=owner_so_far(request),
                        tenant=tenant,
                        filename=(part.filename or "")[:MOST_NAME_CHARS],
                        expires_after_s=expires_after_s,
                    )
                )
            finally:
                file.close()
        finally:
            self._incoming[tenant] -= part.size
            self._incoming += Counter()  # without the tenants that have none
        return json_response(file_object(record))

    async def list_files(self, request: Request) -> Response:
        """Return a page of the owner's files."""
        files = await self._call(self._open().files, owner_so_far(request))
        if (purpose := request.query("purpose")) is not None:
            files = [file for file in files if file.purpose == purpose]
        if _order(request) == "desc":
            files.reverse()
        page, has_more = _page(request, files, lambda file: file.id, MOST_LISTED_FILES, MOST_LISTED_FILES)
        return json_response(
            FileList(
                data=[file_object(file) for file in page],
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=has_more,
            )
        )

    async def retrieve_file(self, request: Request) -> Response:
        """Describe a file."""
        return json_response(file_object(await self._find_file(request)))

    async def file_content(self, request: Request) -> Response:
        """Return the contents of a file."""
        file = await self._find_file(request)
        headers = {"Content-Type": "application/octet-stream", **INERT}
        return Response(_Contents(self._open(), file), 200, headers)

    async def delete_file(self, request: Request) -> Response:
        """Remove a file."""
        file = await self._find_file(request)
        await self._call(self._open().delete_file, file)
        return json_response(DeletedFile(file.id))

    # Batches -----------------------------------------------------------------------------------------

    async def create_batch(self, request: Request) -> Response:
        """Begin a batch. Its requests are checked before they run, not now."""
        store = self._open()
        body = await self._reader.read(request, _decoder)
        if body.endpoint not in ENDPOINTS:
            raise invalid_field("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        if body.completion_window != WINDOW:
            raise invalid_field("completion_window", f"must be {WINDOW}")
        metadata = _metadata(body.metadata)
        owner = owner_so_far(request)
        file = await self._call(store.find_file, body.input_file_id, owner)
        if file is None:
            raise NotFound(f"no file {quoted(body.input_file_id)} of yours is here", param="input_file_id")
        if file.purpose != "batch":
            raise invalid_field("input_file_id", "the file's purpose must be batch")
        now = int(store.now())
        record = BatchRecord(
            id=f"batch_{token_hex(16)}",
            owner=owner,
            tenant=tenant_so_far(request),
            key_id=owner_of(request.api_key),
            created_at=now,
            expires_at=now + DAY_S,
            endpoint=body.endpoint,
            input_file_id=file.id,
            metadata=metadata,
        )
        batch = await self._call(store.create_batch, record)
        self._runner.notice()
        return json_response(batch_object(batch))

    async def retrieve_batch(self, request: Request) -> Response:
        """Return how far a batch is."""
        return json_response(batch_object(await self._find_batch(request)))

    async def list_batches(self, request: Request) -> Response:
        """Return a page of the owner's batches, the newest first."""
        batches = await self._call(self._open().batches, owner_so_far(request))
        page, has_more = _page(
            request, batches, lambda batch: batch.record.id, MOST_LISTED_BATCHES, USUALLY_LISTED
        )
        return json_response(
            BatchList(
                data=[batch_object(batch) for batch in page],
                first_id=page[0].record.id if page else None,
                last_id=page[-1].record.id if page else None,
                has_more=has_more,
            )
        )

    async def cancel_batch(self, request: Request) -> Response:
        """Request the end of a batch. The results that it has are kept."""
        batch = await self._find_batch(request)
        if batch.state.is_final:
            raise InvalidRequest(f"the batch is {batch.state.status}, and cannot be cancelled any more")
        await self._call(self._open().request_cancel, batch.record.id)
        self._runner.notice()
        return json_response(batch_object(msgspec.structs.replace(batch, is_cancelled=True)))

    # Helpers -----------------------------------------------------------------------------------------

    def _open(self) -> BatchStore:
        if self._store is None:
            raise NotServed("files and batches need the setting batches.folder, which this server lacks")
        return self._store

    async def _find_file(self, request: Request) -> FileRecord:
        file_id = request.path_parameters["file_id"]
        file = await self._call(self._open().find_file, file_id, owner_so_far(request))
        if file is None:
            raise NotFound(f"no file {quoted(file_id)} of yours is here")
        return file

    async def _find_batch(self, request: Request) -> StoredBatch:
        batch_id = request.path_parameters["batch_id"]
        batch = await self._call(self._open().find_batch, batch_id, owner_so_far(request))
        if batch is None:
            raise NotFound(f"no batch {quoted(batch_id)} of yours is here")
        return batch

    async def _call(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Call a function of the store in a thread. Raises `UploadFailed` if the disk fails."""
        try:
            return await in_thread(call, *arguments)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UploadFailed(f"the folder of files and batches cannot be used: {reason}") from None


class _Contents:
    """The body of a response: a file, in pieces. It is opened for each piece, and so never left open."""

    def __init__(self, store: BatchStore, file: FileRecord) -> None:
        self._store = store
        self._file = file
        self._start = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await in_thread(self._store.read, self._file, self._start)
        if not piece:
            raise StopAsyncIteration
        self._start += len(piece)
        return piece


def _check_purpose(values: Mapping[str, str]) -> None:
    if values.get("purpose", "batch") != "batch":
        raise invalid_field("purpose", "must be batch: files for anything else are not served here")


def _expiry(values: Mapping[str, str]) -> int | None:
    if _ANCHOR not in values and _SECONDS not in values:
        return None
    if values.get(_ANCHOR) != "created_at":
        raise invalid_field(_ANCHOR, "must be created_at")
    seconds = _number_of(values.get(_SECONDS, ""), _SECONDS)
    if seconds < LEAST_EXPIRY_S:
        raise invalid_field(_SECONDS, f"must be at least {LEAST_EXPIRY_S}")
    return seconds


def _file_of(form: Form) -> FormPart:
    files = [part for part in form.parts if part.name == "file" and part.filename is not None]
    if len(files) != 1:
        raise invalid_field("file", "the form must have one file of this name")
    return files[0]


def _metadata(given: dict[str, Any] | None) -> Metadata | None:
    if given is None:
        return None
    if len(given) > MOST_NOTES:
        raise invalid_field("metadata", f"has at most {MOST_NOTES} entries")
    for name, value in given.items():
        if not isinstance(value, str) or len(name) > MOST_KEY_CHARS or len(value) > MOST_VALUE_CHARS:
            reason = f"maps names of {MOST_KEY_CHARS} characters to texts of {MOST_VALUE_CHARS}, at most"
            raise invalid_field("metadata", reason)
    return given


def _page(
    request: Request, found: Sequence[Listed], id_of: Callable[[Listed], str], most: int, usual: int
) -> tuple[Sequence[Listed], bool]:
    """Return the page that the query asks for, and whether others follow."""
    limit = usual
    if (text := request.query("limit")) is not None:
        limit = _number_of(text, "limit")
    if not 1 <= limit <= most:
        raise invalid_field("limit", f"must be 1 to {most}")
    if (after := request.query("after")) is not None:
        ids = [id_of(each) for each in found]
        if after not in ids:
            raise invalid_field("after", "must be the id of one that is listed")
        found = found[ids.index(after) + 1 :]
    return found[:limit], len(found) > limit


def _order(request: Request) -> str:
    order = request.query("order") or "desc"
    if order not in ("asc", "desc"):
        raise invalid_field("order", "must be asc or desc")
    return order


def _number_of(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise invalid_field(name, "must be a whole number")
    return int(text)
