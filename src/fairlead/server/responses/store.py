"""The responses that are kept for later requests, in memory only. Pure.

Three bounds hold: the bytes of all responses, the time to live, and the owner, because only its key may find
a response. Times are arguments, in seconds of any monotonic clock.

A response counts from its beginning: its input at once, each event as it is added, then the response itself.
When all together exceed the bound, the tenant with the most bytes loses its oldest response, and so on until
the rest fits. Its responses in progress are removed last. So a tenant that stores much removes nothing of
tenants that store little.

The age of a response counts from its end, or from the latest request that continued it: the first turns of a
long conversation are then kept as long as its last one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fairlead.base.errors import InvalidRequest

# Memory of a response and of an event besides their bytes: the objects, and their places in dicts and lists.
RESPONSE_BYTES = 2048
EVENT_BYTES = 64


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response. Only `ResponseStore` changes it.

    id: Its id, which is its job's.
    owner: Who may read, continue and cancel it.
    tenant: Whose share of the memory it takes.
    request_id: Its job's id for clients, by which any front can cancel it.
    input: The request's input in JSON: a text, or a list of items.
    previous: The id of the response that it continues; None: it continues none.
    conversation: The id of the conversation to which its items are added at its end; None: there is none.
    is_background: It does not end with its request.
    keeps_events: Its events can be read again.
    on_removed: Called when it is removed before its end.
    document: The response object in JSON; empty as long as no request may find it.
    events: Whole server-sent events, each at the index of its sequence number.
    has_ended: Nothing more will change.
    is_gone: It was removed, and is empty.
    keep_error: Why the store, or its conversation, does not have it; None: there is no reason.
    expires_s: When it will be removed, on Trio's clock.
    size: The memory that counts for it, in bytes.
    """

    id: str
    owner: str
    tenant: str
    request_id: str = ""
    input: bytes = b""
    previous: str | None = None
    conversation: str | None = None
    is_background: bool = False
    keeps_events: bool = False
    on_removed: Callable[[], None] = lambda: None
    document: bytes = b""
    events: list[bytes] = field(default_factory=list)
    has_ended: bool = False
    is_gone: bool = False
    keep_error: InvalidRequest | None = None
    expires_s: float = 0.0
    size: int = 0


@dataclass(slots=True)
class _Tenant:
    """One tenant's responses: those in progress, and those that have ended, each from the oldest on."""

    size: int = 0
    running: dict[StoredResponse, None] = field(default_factory=dict)
    ended: dict[StoredResponse, None] = field(default_factory=dict)


class ResponseStore:
    """Responses of at most `max_bytes` together, each for `ttl_s`. `size` is what they have now, in bytes.

    `on_change` is called with a response whose object or events have changed, `on_turn` with one of a
    conversation that has ended.
    """

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        assert max_bytes > 0
        assert ttl_s > 0
        self.size = 0
        self.on_change: Callable[[StoredResponse], None] = lambda _response: None
        self.on_turn: Callable[[StoredResponse], None] = lambda _response: None
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._responses: dict[str, StoredResponse] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._ended: dict[StoredResponse, None] = {}  # the next one to expire first

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def tenants(self) -> int:
        """The number of tenants with a response."""
        return len(self._tenants)

    def find(self, response_id: str, owner: str, now_s: float) -> StoredResponse | None:
        """Return a response of this owner; None if there is none that may be found."""
        self.expire(now_s)
        found = self._responses.get(response_id)
        return found if found is not None and found.document and found.owner == owner else None

    # All of the following do nothing with a response that is gone. ------------------------------------

    def begin(self, response: StoredResponse) -> None:
        """Add a response in progress. It ends with `end` or `remove`."""
        assert response.id not in self._responses
        self._responses[response.id] = response
        self._tenants.setdefault(response.tenant, _Tenant()).running[response] = None
        self._grow(response, RESPONSE_BYTES + len(response.input))

    def set_document(self, response: StoredResponse, document: bytes) -> None:
        """Set, or replace, the response object. From here on the response may be found."""
        if not response.is_gone:
            assert document
            change = len(document) - len(response.document)
            response.document = document
            self._grow(response, change)
            self._changed(response)

    def append(self, response: StoredResponse, events: Iterable[bytes]) -> None:
        """Add events to a response in progress."""
        if not response.is_gone:
            before = len(response.events)
            response.events += events
            added = response.events[before:]
            self._grow(response, sum(map(len, added)) + EVENT_BYTES * len(added))
            self._changed(response)

    def end(self, response: StoredResponse, document: bytes, now_s: float) -> None:
        """End a response, with its final object. Its time to live begins."""
        if response.is_gone:
            return
        assert not response.has_ended
        response.has_ended = True
        del self._tenants[response.tenant].running[response]
        self._add_ended(response, now_s)
        self.set_document(response, document)
        if response.conversation is not None:
            self.on_turn(response)

    def renew(self, response: StoredResponse, now_s: float) -> None:
        """Begin the time to live of an ended response again, as if it had ended now."""
        if self.has(response):
            del self._ended[response]
            del self._tenants[response.tenant].ended[response]
            self._add_ended(response, now_s)

    def remove(self, response: StoredResponse) -> None:
        """Remove a response."""
        if not self.has(response):
            return
        self._take_out(response)
        # Readers of its events may refer to it for longer.
        response.is_gone = True
        response.input = response.document = b""
        response.events = []
        response.size = 0
        if not response.has_ended:
            response.on_removed()

    def forget(self, response: StoredResponse) -> None:
        """Remove a response that has ended and is kept elsewhere. Open readers read to its end."""
        assert response.has_ended
        if self.has(response):
            self._take_out(response)

    def has(self, response: StoredResponse) -> bool:
        """Return whether the response is here."""
        return self._responses.get(response.id) is response

    def _take_out(self, response: StoredResponse) -> None:
        tenant = self._tenants[response.tenant]
        if response.has_ended:
            del self._ended[response]
            del tenant.ended[response]
        else:
            del tenant.running[response]
        del self._responses[response.id]
        self.size -= response.size
        tenant.size -= response.size
        if not (tenant.running or tenant.ended):
            del self._tenants[response.tenant]

    def expire(self, now_s: float) -> None:
        """Remove the responses that have expired."""
        while (oldest := next(iter(self._ended), None)) is not None and oldest.expires_s <= now_s:
            self.remove(oldest)

    # Helpers -----------------------------------------------------------------------------------------

    def _add_ended(self, response: StoredResponse, now_s: float) -> None:
        response.expires_s = now_s + self._ttl_s
        self._ended[response] = None
        self._tenants[response.tenant].ended[response] = None

    def _changed(self, response: StoredResponse) -> None:
        if not response.is_gone:
            self.on_change(response)

    def _grow(self, response: StoredResponse, amount: int) -> None:
        """Count this amount more, which may be negative, and remove what exceeds the bound."""
        response.size += amount
        self._tenants[response.tenant].size += amount
        self.size += amount
        while self.size > self._max_bytes:
            largest = max(self._tenants.values(), key=lambda tenant: tenant.size)
            self.remove(next(iter(largest.ended or largest.running)))
