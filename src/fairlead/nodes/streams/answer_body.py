"""The body of a server's success: what it contains, whatever its headers say, and what else is a failure.

Servers and proxies leave out the type of an answer, call it text, compress it unasked, or begin it with a
byte order mark. The content decides then. A page, such as a proxy's login, is never an answer.
"""

import re

import msgspec

from fairlead.base.formats.server_sent_events import BYTE_ORDER_MARK
from fairlead.base.reported import decoded, excerpt
from fairlead.base.upstream_events import EVENTS
from fairlead.nodes.http.client import ResponseTooLarge, UpstreamResponse
from fairlead.nodes.streams.refusals import JSON
from fairlead.nodes.streams.upstream_stream import RelayFailed

# Types that say nothing about the content.
_UNTOLD = frozenset({"", "text/plain"})
# Of these members, a whole answer of any dialect has one.
_ANSWERS = frozenset(
    {
        *("choices", "content", "data", "embedding", "embeddings", "error", "input_tokens", "message"),
        *("output", "response", "results"),
    }
)
_EVENT = re.compile(rb"(?:data|event|id|retry)?:")
_EVENT_START_BYTES = len(b"event:")
_BLANK_BYTES = 1024

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def is_stream(name: str, response: UpstreamResponse, kind: str) -> bool:
    """Return whether the body is a stream of the type `kind`; False if it may be a JSON object.

    Raises `RelayFailed` for anything else.
    """
    told = response.head.content_type
    if told not in _UNTOLD and told not in (kind, JSON):
        raise _of_another_type(name, response, kind)
    beginning = await _beginning(response, may_be_any=told in _UNTOLD)
    if told == kind:
        return True
    if told in _UNTOLD and _begins(kind, beginning):
        return True
    if not beginning.startswith(b"{"):
        raise _of_another_type(name, response, kind)
    return False


async def read_object(name: str, response: UpstreamResponse, most_bytes: int) -> bytes:
    """Return a whole answer. Raises `RelayFailed` if it is no JSON object, or too large."""
    told = response.head.content_type
    if told != JSON and told not in _UNTOLD:
        raise _of_another_type(name, response, JSON)
    try:
        body = (await response.read_all(most_bytes)).removeprefix(BYTE_ORDER_MARK)
    except ResponseTooLarge as error:
        raise RelayFailed(error.message) from error  # a request may cause that
    if not body:
        raise RelayFailed(f"{name} sent an empty answer")
    if told != JSON and _ANSWERS.isdisjoint(decoded(_decode_members, body) or {}):
        raise _of_another_type(name, response, JSON)
    return body


def _of_another_type(name: str, response: UpstreamResponse, kind: str) -> RelayFailed:
    got = excerpt(response.head.content_type) or "no content type"
    return RelayFailed(f"{name} answered with {got} instead of {kind}")


def _begins(kind: str, beginning: bytes) -> bool:
    if kind == EVENTS:
        return _EVENT.match(beginning) is not None
    return beginning.startswith(b"{")


async def _beginning(response: UpstreamResponse, *, may_be_any: bool) -> bytes:
    """Return the first bytes, without a byte order mark and blanks. All but the mark is read again.

    may_be_any: they must be enough to tell events, JSON and pages apart.
    """
    data = beginning = b""
    while piece := await response.read():
        data += piece
        if BYTE_ORDER_MARK.startswith(data):
            continue
        beginning = data.removeprefix(BYTE_ORDER_MARK).lstrip()
        is_enough = beginning.startswith((b"{", b":", b"<")) or len(beginning) >= _EVENT_START_BYTES
        if is_enough or not may_be_any or len(data) > _BLANK_BYTES:
            break
    response.unread(data.removeprefix(BYTE_ORDER_MARK))
    return beginning
