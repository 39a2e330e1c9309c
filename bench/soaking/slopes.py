"""Does a measurement grow? A straight line through blocks of time, with a confidence interval.

Samples a few seconds apart depend on each other, which would make an interval over them too narrow; blocks
of some minutes hardly do. A block counts with its mean, or with its minimum where a measurement falls back
now and then, as memory does when Python's cycle collector has run: what leaks raises the minima, too.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, mean
from typing import NamedTuple

BLOCKS = 10
CONFIDENCE = 0.95


class Slope(NamedTuple):
    """The growth per unit of x, and the two-sided interval in which it lies with a confidence of 95 %."""

    value: float
    low: float
    high: float


def slope(
    xs: Sequence[float], ys: Sequence[float], of_block: Callable[[Sequence[float]], float] = mean
) -> Slope:
    """Return the least-squares slope of ys over xs; xs ascend. At least 8 points are needed.

    The interval is Student's, with the approximation of its quantile by Cornish and Fisher.
    """
    xs, ys = _blocks(xs, mean), _blocks(ys, of_block)
    freedom = len(xs) - 2
    if freedom < 2:
        raise ValueError("too few points for a slope")
    x_mean, y_mean = mean(xs), mean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    value = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - y_mean - value * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
    margin = _student(freedom) * sqrt(rest / freedom / spread)
    return Slope(value, value - margin, value + margin)


def _blocks(values: Sequence[float], of_block: Callable[[Sequence[float]], float]) -> list[float]:
    blocks = min(BLOCKS, len(values) // 2)
    bounds = [len(values) * block // blocks for block in range(blocks + 1)]
    return [of_block(values[start:end]) for start, end in pairwise(bounds)]


def _student(freedom: int) -> float:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
