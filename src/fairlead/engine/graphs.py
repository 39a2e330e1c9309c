"""Steps recorded once for each of some batch sizes, and replayed with one launch.

Independent of models. Recorded work must do the same at the same addresses each time, whatever they contain.
So it must not read the step on the host. Sizes form a ladder; a batch is padded to the next size.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """Runs `work`, and returns a callable that replays it."""

    def __call__(self, work: Work) -> Work: ...


class CudaRecorder:
    """Records CUDA graphs. They share their scratch memory, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # its type is private to torch

    def __call__(self, work: Work) -> Work:
        """Run `work` once on a side stream, as first-time setup cannot be recorded, and then record it."""
        side_stream = _side_stream(self._device)
        current = torch.cuda.current_stream(self._device)
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            work()
        current.wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._pool = graph.pool()
        replay: Work = graph.replay
        return replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the same stream each time: cuBLAS keeps a workspace for each, of 32 MiB on Hopper."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Graphs:
    """Recordings of `work(size)` for the sizes of a ladder. Before `record`, nothing is replayed."""

    def __init__(self, work: Callable[[int], None], recorder: Recorder) -> None:
        self._work = work
        self._recorder = recorder
        self._sizes: list[int] = []
        self._replays: list[Work] = []

    def record(self, most: int, report: Callable[[float], None]) -> None:
        """Record every size of the ladder up to one that holds `most`, the largest first.

        The others then fit in the scratch memory that it has allocated.
        """
        sizes = list(ladder(most))
        replays = []
        for recorded, size in enumerate(reversed(sizes)):
            report(recorded / len(sizes))
            replays.append(self._recorder(partial(self._work, size)))
        self._sizes, self._replays = sizes, replays[::-1]
        report(1.0)

    def play(self, rows: int) -> bool:
        """Replay the step of `rows` rows; return False if no recording is large enough."""
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes):
            return False
        self._replays[index]()
        return True


def ladder(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, 8, 16, then in steps of an eighth to a quarter of the size, until `most` is reached."""
    size = 1
    while True:
        yield size
        if size >= most:
            return
        size += size if size < 16 else max(8, 1 << (size.bit_length() - 3))
