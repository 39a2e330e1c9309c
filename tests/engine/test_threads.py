"""How many threads compute."""

import pytest

from fairlead.engine import threads


@pytest.fixture(autouse=True)
def read_again():
    threads.default_threads.cache_clear()
    yield
    threads.default_threads.cache_clear()


@pytest.mark.parametrize(("value", "count"), [("3", 3), ("2,1", 2)])
def test_number_in_the_environment_is_used(monkeypatch, value, count):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads.default_threads() == count


@pytest.mark.parametrize("value", [None, "", "0", "many", "-1"])
def test_other_values_leave_a_thread_for_each_core(monkeypatch, value):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(threads, "_siblings", lambda cpu: str(cpu // 2))
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _process: {0, 1, 2, 5}, raising=False)
    assert threads.default_threads() == 3
