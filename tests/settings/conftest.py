"""What the tests of settings share."""

from simulation.conftest import simulators

__all__ = ["simulators"]
