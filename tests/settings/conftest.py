"""Fixtures of the tests of settings."""

from simulation.conftest import simulators

__all__ = ["simulators"]
