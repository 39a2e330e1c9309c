"""`GET /events`: the server's state as it changes, as server-sent events with JSON data.

First `history`, the totals of the last ten minutes, then `snapshot`s: one a second, and up to four while
something changes. A client is sent what its key may see; the history has only totals, which every key may
see. Headers tell the client the id of its key, and its role, so that the dashboard offers what it may do.

A snapshot is shared by all clients, and encoded once for all keys with the same models. A client holds only
one of `MAX_CLIENTS` places. Events are created when a client has taken the last one, and the listener
disconnects one that does not read at all. When the server drains, the streams end.
"""

from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec
import trio

from fairlead.base.config import ROLES, ApiKey
from fairlead.base.errors import RateLimited
from fairlead.base.formats.server_sent_events import encode_event
from fairlead.generation.metrics.scope import Scope
from fairlead.generation.metrics.snapshot import Snapshot
from fairlead.router.quotas.access import key_id
from fairlead.server.routes.answers import EVENT_HEADERS
from fairlead.server.routes.history import INTERVAL_S, History
from fairlead.server.routes.request import Request, Response
from fairlead.server.routes.route import EVENTS

MAX_CLIENTS = 64
POLL_INTERVAL_S = 0.25
MAX_SILENCE_S = 1.0
KEY_HEADER = "X-Fairlead-Key"
ROLE_HEADER = "X-Fairlead-Role"
_RETRY_AFTER_S = 10

ScopeOf = Callable[[ApiKey | None], Scope]

_encode = msgspec.json.Encoder().encode


class Events:
    """The view of `/events`. `take` returns the server's current snapshot.

    `draining`: whether the server is about to stop. `scope_of` returns what a key may see.
    """

    def __init__(
        self,
        take: Callable[[], Snapshot],
        draining: Callable[[], bool],
        scope_of: ScopeOf = lambda _: Scope(),
    ) -> None:
        self.history = History(take)
        self.snapshots = SnapshotCache(take, scope_of)
        self._draining = draining
        self._clients = 0
        self._recording = trio.CancelScope()

    async def record_history(self) -> None:
        """Record the history until `stop`: while the application is served."""
        with self._recording:
            await self.history.run()

    def stop(self) -> None:
        """Stop recording the history."""
        self._recording.cancel()

    async def events(self, request: Request) -> Response:
        """Stream the dashboard's data as it changes. Raises `RateLimited` for too many clients."""
        if self._clients >= MAX_CLIENTS:
            message = f"{MAX_CLIENTS} clients already follow the events, the maximum"
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)
        self._clients += 1
        request.at_end(self._leave)
        stream = SnapshotStream(self.snapshots.of(request.api_key), self.history, self._draining)
        return Response(stream, 200, {"Content-Type": EVENTS, **EVENT_HEADERS, **_caller(request.api_key)})

    def _leave(self) -> None:
        self._clients -= 1


class SnapshotCache:
    """The latest snapshot, taken again when it is requested and the last is old."""

    def __init__(self, take: Callable[[], Snapshot], scope_of: ScopeOf = lambda _: Scope()) -> None:
        self.scope_of = scope_of
        self._take = take
        self._taken: Snapshot | None = None
        self._taken_at = -float("inf")
        # By a key's models. An entry is dropped with its last client.
        self._scoped: WeakValueDictionary[tuple[str, ...], ScopedSnapshot] = WeakValueDictionary()

    def latest(self) -> Snapshot:
        """Return a snapshot that is not older than `POLL_INTERVAL_S`."""
        now = trio.current_time()
        if self._taken is None or now - self._taken_at >= POLL_INTERVAL_S:
            self._taken_at = now
            self._taken = _without_output(self._take())
        return self._taken

    def of(self, api_key: ApiKey | None) -> "ScopedSnapshot":
        """Return what a key may see; keys with the same models share one object."""
        models = () if api_key is None else api_key.models
        scoped = self._scoped.get(models)
        if scoped is None:
            scoped = self._scoped[models] = ScopedSnapshot(self, api_key)
        return scoped


class ScopedSnapshot:
    """The latest snapshot as a key may see it, encoded in `event`. `changes` counts its changes."""

    def __init__(self, snapshots: SnapshotCache, api_key: ApiKey | None) -> None:
        self._snapshots = snapshots
        self._api_key = api_key
        self._taken: Snapshot | None = None
        self._seen: Snapshot | None = None
        self.changes = 0
        self.event = b""

    def update(self) -> None:
        """Update `event` and `changes`."""
        taken = self._snapshots.latest()
        if taken is self._taken:
            return
        self._taken = taken
        snapshot = self._snapshots.scope_of(self._api_key).of_snapshot(taken)
        # That time goes on is no change.
        queue = msgspec.structs.replace(snapshot.queue, oldest_wait_s=0.0)
        seen = msgspec.structs.replace(snapshot, at_s=0.0, queue=queue)
        if seen != self._seen:
            self._seen = seen
            self.changes += 1
        self.event = encode_event(_encode(snapshot), name="snapshot")


def _caller(api_key: ApiKey | None) -> dict[str, str]:
    """Return headers that tell a client its key's id and role. Without keys, it may do everything."""
    if api_key is None:
        return {ROLE_HEADER: ROLES[-1]}
    return {KEY_HEADER: key_id(api_key), ROLE_HEADER: api_key.role}


def _without_output(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without the output of commands, which is for operators and may be anything."""
    if not any(model.output for model in snapshot.models):
        return snapshot
    models = tuple(msgspec.structs.replace(model, output=()) for model in snapshot.models)
    return msgspec.structs.replace(snapshot, models=models)


class SnapshotStream:
    """The body for one client. Its next piece is made when the last has been sent. Holds no resources."""

    def __init__(self, snapshot: ScopedSnapshot, history: History, draining: Callable[[], bool]) -> None:
        self._snapshot = snapshot
        self._history = history
        self._draining = draining
        self._sent_changes = -1
        self._sent_at = 0.0

    def __aiter__(self) -> "SnapshotStream":
        return self

    async def __anext__(self) -> bytes:
        if self._sent_changes < 0:
            history = {"every_s": INTERVAL_S, "columns": self._history.columns()}
            return encode_event(_encode(history), name="history") + self._next_event()
        while not self._draining():
            await trio.sleep(POLL_INTERVAL_S)
            self._snapshot.update()
            is_silent = trio.current_time() - self._sent_at >= MAX_SILENCE_S
            if is_silent or self._snapshot.changes != self._sent_changes:
                return self._next_event()
        raise StopAsyncIteration

    def _next_event(self) -> bytes:
        self._snapshot.update()
        self._sent_changes = self._snapshot.changes
        self._sent_at = trio.current_time()
        return self._snapshot.event
