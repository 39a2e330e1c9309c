"""The store that all fronts share: the dispatcher has it, and is its only writer.

One writer, because budgets and keys must be right in one place, and that is where jobs are admitted. Each
front keeps the counts of its jobs until the dispatcher has answered that they are in the store. So a batch
survives the dispatcher: the next one gets it again, and the store knows it by its number.

Keys and budgets go the other way. The dispatcher sends all of them to every front, and a change is answered
when the fronts have said that they use them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import trio

from fairlead.base.errors import NoNode, NotServed, StoreUnavailable
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.front import Front
from fairlead.distributed.frontends.questions import Orders, Questions
from fairlead.store.records import KeyChange, KeySet, SetBudget, StoredKey, UsageBatch, UsageQuery, UsageRow
from fairlead.store.store import CALL_S, StoreKeeper

ANSWER_S = CALL_S + 3.0
SEEN_S = 2.0
"""How long a change waits for fronts that do not answer. They get it before anything else later."""

_NO_STORE = "the dispatcher has no store: set `store` in its configuration"


class SharedStore:
    """The dispatcher's side. `questions` and `orders` are for `FrontServer`.

    keeper: the store; None: there is none. What fronts count is dropped then.
    fronts: returns the fronts that are connected, or away for a short time.
    """

    def __init__(self, keeper: StoreKeeper | None, fronts: Callable[[], Iterable[Front]]) -> None:
        self._keeper = keeper
        self._fronts = fronts
        self._sent: wire.StoredKeys | None = None if keeper is not None else wire.StoredKeys(0, KeySet())
        self._seen: dict[str, int] = {}
        self._has_seen = trio.Event()
        if keeper is not None:
            keeper.on_keys.append(self._send)
        self.questions: Questions = {"keys_seen": self._note_seen}
        self.orders: Orders = {
            "write_usage": self._write,
            "usage": self._usage,
            "change_key": self._change_key,
            "change_budget": self._change_budget,
        }

    def connected(self, front: Front) -> None:
        """Send the keys to a front that has connected, if they are known."""
        if self._sent is not None:
            front.send(self._sent)

    def end_front(self, name: str) -> None:
        """Forget a front that has ended."""
        self._seen.pop(name, None)
        self._wake()

    def _send(self, keys: KeySet) -> None:
        number = 1 if self._sent is None else self._sent.number + 1
        self._sent = wire.StoredKeys(number, keys)
        for front in self._fronts():
            front.send(self._sent)

    def _note_seen(self, front: str, number: int) -> None:
        """Record that a front uses the keys that were sent with this number."""
        self._seen[front] = number
        self._wake()

    def _wake(self) -> None:
        self._has_seen.set()
        self._has_seen = trio.Event()

    async def _write(self, batch: object) -> None:
        if self._keeper is not None:
            await self._keeper.write(msgspec.convert(batch, UsageBatch))

    async def _usage(self, query: object) -> list[UsageRow]:
        if self._keeper is None:
            raise NotServed(_NO_STORE)
        return await self._keeper.usage(msgspec.convert(query, UsageQuery))

    async def _change_key(self, change: object) -> StoredKey:
        """Change a key; return when all connected fronts use it, or have had `SEEN_S` to do so."""
        if self._keeper is None:
            raise NotServed(_NO_STORE)
        key = await self._keeper.change_key(msgspec.convert(change, KeyChange))
        await self._until_seen()
        return key

    async def _change_budget(self, change: object) -> None:
        """Change a budget; return as `_change_key` does."""
        if self._keeper is None:
            raise NotServed(_NO_STORE)
        await self._keeper.change_budget(msgspec.convert(change, SetBudget))
        await self._until_seen()

    async def _until_seen(self) -> None:
        """Wait until all connected fronts use what was sent last, for `SEEN_S` at most."""
        number = 0 if self._sent is None else self._sent.number
        with trio.move_on_after(SEEN_S):
            while any(
                front.link is not None and self._seen.get(front.name, 0) < number for front in self._fronts()
            ):
                await self._has_seen.wait()


class RemoteStore:
    """A front's side. Implements `StoreAccess`, and writes the usage of this front.

    client: the connection to the dispatcher.
    on_keys: the functions that are called with the keys of the store, when they come and when they change.
    """

    def __init__(self, client: DispatchClient) -> None:
        self.on_keys: list[Callable[[KeySet], None]] = []
        self._client = client
        self._keys: KeySet | None = None
        client.on_keys = self._receive

    @property
    def keys(self) -> KeySet | None:
        """All stored keys and budgets; None until the dispatcher has sent them once."""
        return self._keys

    async def write(self, batch: UsageBatch) -> None:
        """Write a batch of usage, once. Raises `StoreUnavailable` and `InvalidRequest`."""
        await self._ask("write_usage", batch)

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums of a query. Raises `StoreUnavailable`, `InvalidRequest` and `NotServed`."""
        return msgspec.convert(await self._ask("usage", query), list[UsageRow])

    async def change_key(self, change: KeyChange) -> StoredKey:
        """Return the changed key. Raises as `Database.change_key`, and `NotServed`."""
        return msgspec.convert(await self._ask("change_key", change), StoredKey)

    async def change_budget(self, change: SetBudget) -> None:
        """Change a budget. Raises as `Database.change_budget`, and `NotServed`."""
        await self._ask("change_budget", change)

    async def _ask(self, order: str, value: object) -> Any:
        try:
            return await self._client.ask(order, value, timeout_s=ANSWER_S)
        except NoNode as error:
            raise StoreUnavailable(reason=error.message) from error

    def _receive(self, message: wire.StoredKeys) -> None:
        self._keys = message.keys
        for use in self.on_keys:
            use(message.keys)
        self._client.tell("keys_seen", message.number)
