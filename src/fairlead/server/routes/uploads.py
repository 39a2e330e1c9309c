"""Forms with files: received into a file without a name, and kept there until their request ends.

A form may be large, the model may be named at its end, and another node may need all of it again. So it is
received as a whole before its job is queued, but on disk: a slow client holds no seat and no memory. The
kernel frees the space when the file is closed, also if this process is killed.

The space is shared between tenants, as the memory for other bodies is (`request_body`). They use the threads
that read and write in turn.
"""

import os
import tempfile
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import IO, Any, TypeVar

import structlog
import trio

from fairlead.base.config import MOST_UPLOADS, Limits
from fairlead.base.errors import InvalidRequest, UploadFailed
from fairlead.base.formats.multipart import FormParser, InvalidForm, boundary_of
from fairlead.base.job import Form, FormPart
from fairlead.generation.shares import Shares
from fairlead.generation.turns import Turns, in_turn
from fairlead.server.routes.request import Request
from fairlead.server.routes.request_body import IncomingBody
from fairlead.server.routes.request_caller import tenant_so_far

THREADS = 2
WRITTEN_BYTES = 64 * 1024

Result = TypeVar("Result")

logger = structlog.get_logger("fairlead.server.routes")


class Uploads:
    """All forms on disk. `limits` have the space for them."""

    def __init__(self, limits: Limits) -> None:
        self.space = Shares(limits.uploads_bytes)
        self._upload_timeout_s = limits.upload_timeout_s
        self._turns = Turns(THREADS, most_waiting=2 * MOST_UPLOADS)

    async def receive(
        self, request: Request, kept: frozenset[str], check: Callable[[dict[str, str]], None]
    ) -> tuple[Form, dict[str, str]]:
        """Return the form in the body of a request, and the values of the fields that are `kept`.

        `check` gets these values before the rest is received, each time there is another, and may raise.
        Raises `InvalidRequest`, `UploadFailed`, and as `IncomingBody.receive` does. The form is kept until
        the request ends.
        """
        parser = FormParser(_read(boundary_of, request.headers.get("Content-Type", "")), kept)
        body: IncomingBody = request.open_body()
        tenant = tenant_so_far(request)
        contents = UploadedContents(self, tenant)
        if (direct := (request.scope.get("extensions") or {}).get("fairlead")) is not None:
            direct.allow_body(self._upload_timeout_s)

        async def take(piece: bytes) -> None:
            known = len(parser.values)
            request.body_bytes += len(piece)
            data = _read(parser.feed, piece)
            if len(parser.values) > known:
                check(parser.values)
            await contents.add(data)

        least_bytes = self.space.total // MOST_UPLOADS
        await body.receive(self.space, tenant, take, close=contents.close, least_bytes=least_bytes)
        _read(parser.end)
        await contents.flush()
        parts = tuple(
            FormPart(part.name, part.filename, part.content_type, part.start, part.size)
            for part in parser.parts
        )
        return Form(parts, contents), parser.values

    async def run(self, tenant: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that reads or writes, in a thread, by tenants' turns. Raises `UploadFailed`.

        When cancelled, wait for the thread to end: it uses a descriptor.
        """
        async with in_turn(self._turns, tenant, timeout_s=inf):
            try:
                return await trio.to_thread.run_sync(call, *arguments)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                logger.error("form not kept", reason=reason)  # noqa: TRY400  # the place says nothing
                raise UploadFailed(f"the form cannot be kept on the server's disk: {reason}") from None


class UploadedContents:
    """The contents of one form, in a file that is opened when there is something to write."""

    def __init__(self, uploads: Uploads, tenant: str) -> None:
        self._uploads = uploads
        self._tenant = tenant
        self._file: IO[bytes] | None = None
        self._unwritten = bytearray()
        self._is_closed = False

    async def add(self, data: bytes) -> None:
        """Append data. They may be written later."""
        self._unwritten += data
        if len(self._unwritten) >= WRITTEN_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is not written yet."""
        if self._unwritten:
            data, self._unwritten = bytes(self._unwritten), bytearray()
            await self._uploads.run(self._tenant, self._write, data)

    async def read(self, start: int, size: int) -> bytes:
        """Return some of them."""
        return await self._uploads.run(self._tenant, self._read, start, size)

    def close(self) -> None:
        """Free the space. Nothing may be read or written any more."""
        self._is_closed = True
        self._unwritten.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory())  # noqa: SIM115  # see `close`
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _read(self, start: int, size: int) -> bytes:
        if self._file is None or self._is_closed:
            raise OSError("it is closed")
        data = os.pread(self._file.fileno(), size, start)
        if len(data) < size:
            raise OSError("a part of it is missing")
        return data


def directory() -> Path | None:
    """Return the directory of the files; None: that of `tempfile`.

    `/tmp` is memory on many systems, so `/var/tmp` is used, unless `TMPDIR` names another one.
    """
    usual = Path("/var/tmp")  # noqa: S108  # the file has no name there
    return usual if "TMPDIR" not in os.environ and os.access(usual, os.W_OK | os.X_OK) else None


def _read(read: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of `multipart`. Raises `InvalidRequest`."""
    try:
        return read(*arguments)
    except InvalidForm as error:
        message = str(error) if error.field is None else f"{error.field[:100]}: {error}"
        raise InvalidRequest(message, param=error.field) from None
