"""Hypothesis without stopwatch or dice: machines are busy, and a test says the same every time."""

from hypothesis import settings

unhurried = settings(deadline=None, derandomize=True, database=None)
