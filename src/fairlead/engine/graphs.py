"""Steps recorded once for each of some batch sizes, and played back at the price of one launch.

Knows no model. What is recorded must do the same work at the same addresses each time, whatever is in them:
it must not look at the step on the host. Sizes form a ladder; a batch is padded up to the next rung.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """Runs `work`, and returns what does the same again without it."""

    def __call__(self, work: Work) -> Work: ...


class CudaRecorder:
    """Records CUDA graphs. They share their scratch memory, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch names its type only for itself

    def __call__(self, work: Work) -> Work:
        """Run `work` once beside, for what is made at a first time cannot be recorded, then record it."""
        beside: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            work()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._pool = graph.pool()
        replay: Work = graph.replay
        return replay


class Graphs:
    """`work(size)` for the sizes of a ladder. Without a recording, nothing is played."""

    def __init__(self, work: Callable[[int], None], recorder: Recorder) -> None:
        self._work = work
        self._recorder = recorder
        self._sizes: list[int] = []
        self._replays: list[Work] = []

    def record(self, most: int, report: Callable[[float], None]) -> None:
        """Record every size of the ladder up to one that holds `most`, the largest first.

        So the others find room in the scratch memory that it has made.
        """
        sizes = list(ladder(most))
        replays = []
        for done, size in enumerate(reversed(sizes)):
            report(done / len(sizes))
            replays.append(self._recorder(partial(self._work, size)))
        self._sizes, self._replays = sizes, replays[::-1]
        report(1.0)

    def play(self, rows: int) -> bool:
        """Play the step of `rows` rows, if there is a recording that holds them."""
        place = bisect_left(self._sizes, rows)
        if place == len(self._sizes):
            return False
        self._replays[place]()
        return True


def ladder(most: int) -> Iterator[int]:
    """1, 2, 4, 8, 16, then in steps of an eighth to a quarter of the size, until `most` is reached."""
    size = 1
    while True:
        yield size
        if size >= most:
            return
        size += size if size < 16 else max(8, 1 << (size.bit_length() - 3))
