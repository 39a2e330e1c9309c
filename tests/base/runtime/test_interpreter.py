"""The process-wide settings of a server; a benchmark measures their effect."""

import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.base.runtime import interpreter

# In a separate process, because the settings would remain for all other tests.
SCRIPT = """
import sys
from fairlead.base.runtime import interpreter

def held_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

interpreter.prepare()
assert sys.getswitchinterval() == interpreter.SWITCH_INTERVAL_S
bytes(32_000_000)  # freed at once: left to itself, glibc takes what is smaller from its heap from now on
before = held_mb()
bodies, between = [], []
for _ in range(10):
    bodies.append(b"x" * 10_000_000)
    between.append([bytearray(1000) for _ in range(100)])
assert held_mb() > before + 90
del bodies
assert held_mb() < before + 20, held_mb() - before
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_large_allocations_are_returned_to_the_system_when_freed():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def test_c_library_without_mallopt_is_not_changed(monkeypatch):
    monkeypatch.setattr(interpreter.ctypes, "CDLL", lambda _name: object())
    interval = sys.getswitchinterval()
    try:
        interpreter.prepare()
    finally:
        sys.setswitchinterval(interval)
