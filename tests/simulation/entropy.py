"""Makes every source of randomness and of time that the product reads depend on a seed.

`install` replaces functions of the standard library for the rest of the process. It must run before the
product is imported, because of `from time import perf_counter`. The replacements call the real functions
while no simulation runs. The process must have been started with PYTHONHASHSEED=0 (see `workers`).
"""

import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any


class Source:
    """The time and the random bytes of one simulation.

    `elapsed` is the monotonic clock, in seconds. The wall clock is that plus `wall_offset_s`, which may
    change at any time. Each call of the performance counter advances that counter by `tick_s`, so code
    that measures its own duration sees time pass although virtual time does not advance.
    """

    EPOCH_S = 1_750_000_000.0

    def __init__(self, seed: int, elapsed: Callable[[], float], *, tick_s: float = 0.0) -> None:
        self.elapsed = elapsed
        self.wall_offset_s = self.EPOCH_S
        self.tick_s = tick_s
        self._ticks = 0
        self._random = _Random(f"product {seed}")

    def wall_s(self) -> float:
        """Return the wall clock's time."""
        return self.elapsed() + self.wall_offset_s

    def performance_s(self) -> float:
        """Return the performance counter's time."""
        self._ticks += 1
        return self.elapsed() + self._ticks * self.tick_s

    def bytes(self, count: int) -> bytes:
        """Return `count` random bytes."""
        return self._random.randbytes(count)


_Random = random.Random
_source: Source | None = None


def use(source: Source | None) -> None:
    """Use this source from now on; None: the sources of the system."""
    global _source  # noqa: PLW0603  # replaces sources of the system, which are global
    _source = source


class SeededRandom(_Random):
    """`random.Random` that takes its default seed from the simulation."""

    def __init__(self, seed: Any = None) -> None:
        if seed is None and _source is not None:
            seed = _source.bytes(8)
        super().__init__(seed)


def install() -> None:
    """Replace the functions. The product must not have been imported yet."""
    assert "fairlead" not in sys.modules, "the product would keep the real functions"
    random.Random = SeededRandom
    for module, name, of_source in (
        (time, "time", Source.wall_s),
        (time, "time_ns", lambda source: int(source.wall_s() * 1e9)),
        (time, "monotonic", lambda source: source.elapsed()),
        (time, "monotonic_ns", lambda source: int(source.elapsed() * 1e9)),
        (time, "perf_counter", Source.performance_s),
        (time, "perf_counter_ns", lambda source: int(source.performance_s() * 1e9)),
        (secrets, "token_bytes", lambda source, count=32: source.bytes(count)),
        (os, "urandom", lambda source, count: source.bytes(count)),
        (uuid, "uuid4", lambda source: uuid.UUID(bytes=source.bytes(16), version=4)),
    ):
        setattr(module, name, _either(getattr(module, name), of_source))


def _either(real: Callable[..., Any], of_source: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*arguments: Any) -> Any:
        return real(*arguments) if _source is None else of_source(_source, *arguments)

    return chosen
