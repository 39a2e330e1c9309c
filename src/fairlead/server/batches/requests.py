"""The input file of a batch: one request a line. All are checked before the first one runs.

{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": […]}}
"""

from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fairlead.server.batches.disk import lines_of, read_pieces
from fairlead.server.batches.records import BatchFault

MOST_FAULTS = 100
MOST_ID_CHARS = 512


class BatchRequest(msgspec.Struct, frozen=True):
    """One request of a batch.

    custom_id: The client's name for it.
    method: POST.
    url: The batch's endpoint.
    body: The body of the request, which is read when it runs.
    """

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(BatchRequest).decode


class RequestFile:
    """The requests of a valid input file, by number from 0. Holds where they are, not what they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._sizes = array("Q")

    def __len__(self) -> int:
        return len(self._starts)

    def size(self, number: int) -> int:
        """Return the bytes of a request's line."""
        return self._sizes[number]

    def read(self, number: int) -> BatchRequest:
        """Return a request. Blocks, and raises `OSError`."""
        return _decode(read_pieces(self._path, self._starts[number], self._sizes[number]))

    def check(self, endpoint: str, *, most_lines: int, most_bytes: int) -> tuple[BatchFault, ...]:
        """Find the requests; return why they cannot run, at most `MOST_FAULTS` reasons. Blocks.

        endpoint: The path that all must have.
        most_lines: The most requests.
        most_bytes: The longest line.
        """
        faults: list[BatchFault] = []
        for fault in self._faults(endpoint, most_lines, most_bytes):
            faults.append(fault)
            if len(faults) == MOST_FAULTS:
                break
        return tuple(faults)

    def _faults(self, endpoint: str, most_lines: int, most_bytes: int) -> Iterator[BatchFault]:
        seen: set[str] = set()
        for start, line in lines_of(self._path, most_bytes):
            number = len(self._starts) + 1
            if number > most_lines:
                yield BatchFault("too_many_requests", f"a batch has at most {most_lines} (batches.lines)")
                return
            self._starts.append(start)
            self._sizes.append(len(line))
            if len(line) > most_bytes:
                message = f"a line has at most {most_bytes} bytes (limits.bodyBytes)"
                yield BatchFault("line_too_long", message, None, number)
                continue
            try:
                request = _decode(line)
            except msgspec.ValidationError as error:
                yield BatchFault("invalid_request", str(error), None, number)
                continue
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield BatchFault("invalid_json_line", "the line is not valid JSON", None, number)
                continue
            yield from _faults_of(request, endpoint, seen, number)
        if not self._starts:
            yield BatchFault("empty_file", "the input file has no requests", "input_file_id")


def _faults_of(request: BatchRequest, endpoint: str, seen: set[str], number: int) -> Iterator[BatchFault]:
    if not 1 <= len(request.custom_id) <= MOST_ID_CHARS:
        message = f"custom_id has 1 to {MOST_ID_CHARS} characters"
        yield BatchFault("invalid_custom_id", message, "custom_id", number)
    elif request.custom_id in seen:
        message = "an earlier line has the same custom_id"
        yield BatchFault("duplicate_custom_id", message, "custom_id", number)
    seen.add(request.custom_id)
    if request.method != "POST":
        yield BatchFault("invalid_method", "method must be POST", "method", number)
    if request.url != endpoint:
        yield BatchFault(
            "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}", "url", number
        )
    if not bytes(request.body).startswith(b"{"):
        yield BatchFault("invalid_body", "body must be an object", "body", number)
