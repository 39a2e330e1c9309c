"""The growth of a measurement: a straight line through blocks of time, with a confidence interval.

Samples a few seconds apart are correlated, so an interval computed from them would be too narrow. Blocks of a
few minutes are almost independent. A block is represented by its mean, or by its minimum for measurements
that drop occasionally, as memory does when Python's cycle collector runs. A leak raises the minima as well.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, mean
from typing import NamedTuple

BLOCKS = 10
CONFIDENCE = 0.95


class Slope(NamedTuple):
    """The growth per unit of x, and its two-sided confidence interval of 95 %."""

    value: float
    low: float
    high: float


def slope(
    xs: Sequence[float], ys: Sequence[float], of_block: Callable[[Sequence[float]], float] = mean
) -> Slope:
    """Return the least-squares slope of ys over xs, which must ascend. Needs at least 8 points.

    The interval uses Student's t-distribution, with the quantile approximated by Cornish and Fisher.
    """
    xs, ys = _blocks(xs, mean), _blocks(ys, of_block)
    freedom = len(xs) - 2
    if freedom < 2:
        raise ValueError("too few points for a slope")
    x_mean, y_mean = mean(xs), mean(ys)
    x_squares = sum((x - x_mean) ** 2 for x in xs)
    value = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / x_squares
    rest = sum((y - y_mean - value * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
    margin = _student(freedom) * sqrt(rest / freedom / x_squares)
    return Slope(value, value - margin, value + margin)


def _blocks(values: Sequence[float], of_block: Callable[[Sequence[float]], float]) -> list[float]:
    blocks = min(BLOCKS, len(values) // 2)
    bounds = [len(values) * block // blocks for block in range(blocks + 1)]
    return [of_block(values[start:end]) for start, end in pairwise(bounds)]


def _student(freedom: int) -> float:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
