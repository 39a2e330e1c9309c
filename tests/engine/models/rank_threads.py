"""Two or more ranks of a model as threads of this process, connected by gloo as processes are."""

import queue
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from fairlead.base.messages import WorkerSpec
from fairlead.engine import process_groups
from fairlead.engine.loading import LoadedModel, load_runner
from fairlead.engine.models.parallel import Ranks
from fairlead.engine.ranks import Membership
from fairlead.engine.torch_loading import follower_of

SLOTS = 40  # those of `tiny.Driver`
TIMEOUT = timedelta(seconds=60)


class RankThreads:
    """Loads every rank but rank 0 in a thread of its own; each then executes rank 0's messages.

    `loaded` has what each rank has loaded, by its number.
    """

    def __init__(self, directory: Path, size: int, options: dict) -> None:
        self.loaded: dict[int, LoadedModel] = {}
        self.errors: list[BaseException] = []
        spec = {"device": "cpu", "dtype": "float32", "slots": SLOTS, "parallel": size, **options}
        self._spec = WorkerSpec(path=str(directory), **spec)
        self._store = directory / f"store-{secrets.token_hex(4)}"
        self._all_loaded = threading.Barrier(size, timeout=TIMEOUT.total_seconds())
        self._inboxes = [queue.SimpleQueue() for _ in range(size - 1)]
        self._threads = [threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, size)]

    def start(self) -> LoadedModel:
        for thread in self._threads:
            thread.start()
        self._load(0)
        return self.loaded[0]

    def stop(self) -> None:
        self._send(None)
        for thread in self._threads:
            thread.join()

    def _load(self, rank: int) -> Ranks:
        ranks = Ranks(rank, self._spec.parallel)

        def join(device) -> None:
            process_groups.connect(ranks, str(self._store), device, timeout=TIMEOUT)

        membership = Membership(ranks, join, self._send, self._give_up)
        try:
            self.loaded[rank] = load_runner(self._spec, lambda _fraction, _stage: None, membership=membership)
            self._all_loaded.wait()
        except BaseException:
            self._all_loaded.abort()
            raise
        return ranks

    def _follow(self, rank: int) -> None:
        try:
            ranks = self._load(rank)
            follower = follower_of(self.loaded[rank], ranks)
            while (message := self._inboxes[rank - 1].get()) is not None:
                follower.execute(message)
        except BaseException as error:
            self.errors.append(error)
            raise

    def _send(self, message) -> None:
        for inbox in self._inboxes:
            inbox.put(message)

    def _give_up(self, error: Exception):
        raise error


@contextmanager
def on_ranks(directory: Path, size: int = 2, **options) -> Iterator[RankThreads]:
    """Load a model on so many ranks; `loaded[0]` runs steps on all of them."""
    threads = RankThreads(directory, size, options)
    try:
        threads.start()
        yield threads
    finally:
        threads.stop()
    assert threads.errors == []
