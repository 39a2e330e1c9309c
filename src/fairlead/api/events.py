"""`GET /events`: the server's state as it changes, as server-sent events with JSON data.

First `history`, the totals of the last ten minutes, then `snapshot`s: one a second, and up to four while
something changes. A watcher is sent what its key may see; the history has only totals, which every key may
see.

A snapshot is shared by all watchers, and encoded once for all keys with the same models. A watcher holds only
its place among `WATCHERS`. Events are created when a watcher has taken the last one, and the listener
disconnects one that does not read at all. When the server drains, the streams end.
"""

from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec
import trio
from quart import Response, g
from quart_trio import QuartTrio

from fairlead.api.exchange import response_of
from fairlead.api.history import EVERY_S, History
from fairlead.api.request import Call, Reply
from fairlead.api.sse import HEADERS
from fairlead.config import ApiKey
from fairlead.errors import RateLimited
from fairlead.http.server_sent_events import encode_event
from fairlead.telemetry.scope import Scope
from fairlead.telemetry.snapshot import Snapshot

WATCHERS = 64
LOOK_EVERY_S = 0.25
SPEAK_EVERY_S = 1.0
_FULL_RETRY_S = 10

ScopeOf = Callable[[ApiKey | None], Scope]

_encode = msgspec.json.Encoder().encode


class Events:
    """The route, and the snapshots that its watchers share. `take` returns the server's current snapshot.

    `draining` says whether the server is about to stop, `scope_of` what a key may see. Records the history
    while the app is served.
    """

    def __init__(
        self,
        take: Callable[[], Snapshot],
        draining: Callable[[], bool],
        scope_of: ScopeOf = lambda _: Scope(),
    ) -> None:
        self.history = History(take)
        self.looks = Looks(take, scope_of)
        self._draining = draining
        self._watchers = 0
        self._keeping = trio.CancelScope()

    def add_to(self, app: QuartTrio) -> None:
        """Register the route, and record the history from the app's start to its end."""
        app.add_url_rule("/events", view_func=self.events, methods=["GET"])

        async def start() -> None:
            app.nursery.start_soon(self._keep)

        async def stop() -> None:
            self._keeping.cancel()

        app.before_serving(start)
        app.after_serving(stop)

    async def events(self) -> Response:
        """Stream the dashboard's data as it changes. Raises `RateLimited` for too many watchers."""
        if self._watchers >= WATCHERS:
            raise RateLimited(f"{WATCHERS} watch already, and no more may", retry_after_s=_FULL_RETRY_S)
        call: Call = g.call
        self._watchers += 1
        call.nursery.start_soon(self._stay)
        watch = Watch(self.looks.view(call.api_key), self.history, self._draining)
        return response_of(Reply(watch, 200, HEADERS))

    async def _stay(self) -> None:
        """Count a watcher, as long as its exchange lasts."""
        try:
            await trio.sleep_forever()
        finally:
            self._watchers -= 1

    async def _keep(self) -> None:
        with self._keeping:
            await self.history.run()


class Looks:
    """The latest snapshot, taken again when it is requested and the last is old."""

    def __init__(self, take: Callable[[], Snapshot], scope_of: ScopeOf = lambda _: Scope()) -> None:
        self.scope_of = scope_of
        self._take = take
        self._taken: Snapshot | None = None
        self._taken_at = -float("inf")
        # By a key's models. A view is dropped with its last watcher.
        self._views: WeakValueDictionary[tuple[str, ...], View] = WeakValueDictionary()

    def look(self) -> Snapshot:
        """Return a snapshot that is not older than `LOOK_EVERY_S`."""
        now = trio.current_time()
        if self._taken is None or now - self._taken_at >= LOOK_EVERY_S:
            self._taken_at = now
            self._taken = _shown(self._take())
        return self._taken

    def view(self, api_key: ApiKey | None) -> "View":
        """Return the view of a key; keys with the same models share one."""
        models = () if api_key is None else api_key.models
        view = self._views.get(models)
        if view is None:
            view = self._views[models] = View(self, api_key)
        return view


class View:
    """The latest snapshot as a key may see it, encoded in `event`. `changes` counts its changes."""

    def __init__(self, looks: Looks, api_key: ApiKey | None) -> None:
        self._looks = looks
        self._api_key = api_key
        self._taken: Snapshot | None = None
        self._seen: Snapshot | None = None
        self.changes = 0
        self.event = b""

    def look(self) -> None:
        """Update `event` and `changes`."""
        taken = self._looks.look()
        if taken is self._taken:
            return
        self._taken = taken
        snapshot = self._looks.scope_of(self._api_key).of_snapshot(taken)
        seen = msgspec.structs.replace(snapshot, at_s=0.0)  # a new time alone is no change
        if seen != self._seen:
            self._seen = seen
            self.changes += 1
        self.event = encode_event(_encode(snapshot), name="snapshot")


def _shown(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without the output of commands, which is for operators and may be anything."""
    if not any(model.output for model in snapshot.models):
        return snapshot
    models = tuple(msgspec.structs.replace(model, output=()) for model in snapshot.models)
    return msgspec.structs.replace(snapshot, models=models)


class Watch:
    """One watcher's body. Its next piece is made when the last has been sent. Holds no resources."""

    def __init__(self, view: View, history: History, draining: Callable[[], bool]) -> None:
        self._view = view
        self._history = history
        self._draining = draining
        self._told = -1
        self._told_at = 0.0

    def __aiter__(self) -> "Watch":
        return self

    async def __anext__(self) -> bytes:
        if self._told < 0:
            kept = {"every_s": EVERY_S, "columns": self._history.columns()}
            return encode_event(_encode(kept), name="history") + self._tell()
        while not self._draining():
            await trio.sleep(LOOK_EVERY_S)
            self._view.look()
            silent_s = trio.current_time() - self._told_at
            if self._view.changes != self._told or silent_s >= SPEAK_EVERY_S:
                return self._tell()
        raise StopAsyncIteration

    def _tell(self) -> bytes:
        self._view.look()
        self._told = self._view.changes
        self._told_at = trio.current_time()
        return self._view.event
