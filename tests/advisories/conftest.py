"""Two servers with the demonstration model, one of them with API keys, checked after each test."""

from collections.abc import Iterator

import pytest

from advisories.target import Target
from e2e.real_server import configured, real_server

KEYS = {
    "ana": "sk-ana-0123456789abcdefghij-ana",
    "bob": "sk-ana-0123456789abcdefghij-bob",  # as long as ana's, and equal except at the end
    "limited": "sk-limited-0123456789abcdef",
}


@pytest.fixture(autouse=True)
def numbers(request) -> tuple[str, ...]:
    """Return the advisories that the test tries; see `tries`."""
    return getattr(request, "param", ())


@pytest.fixture(scope="session")
def server_home(tmp_path_factory):
    """Return the home directory of the servers, with their caches and temporary files."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("tmp", "cache"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="session")
def environment(server_home) -> dict[str, str]:
    return {
        "HOME": str(server_home),
        "TMPDIR": str(server_home / "tmp"),
        "XDG_CACHE_HOME": str(server_home / "cache"),
        "HF_HOME": str(server_home / "cache"),
    }


@pytest.fixture(scope="session")
def running_without_keys(environment) -> Iterator[Target]:
    with real_server(environment=environment) as running:
        target = Target(running)
        yield target
        target.http.close()


@pytest.fixture(scope="session")
def running_with_keys(environment, tmp_path_factory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("keys")
    keys = [
        {"key": KEYS["ana"], "user": "ana"},
        {"key": KEYS["bob"], "user": "bob"},
        {"key": KEYS["limited"], "user": "limited", "models": ["other"]},
    ]
    cache = {"kvCache": {"isolateTenants": True}}
    with real_server(*configured(folder, cache, apiKeys=keys), environment=environment) as running:
        target = Target(running, KEYS["ana"])
        yield target
        target.http.close()


def checked_afterwards(target: Target) -> Iterator[Target]:
    """Yield the server, then check that it still works."""
    log_lines = len(target.running.log)
    yield target
    target.assert_unharmed(log_lines)


@pytest.fixture
def server(running_without_keys) -> Iterator[Target]:
    """Yield the server without keys; check after the test that it still works."""
    yield from checked_afterwards(running_without_keys)


@pytest.fixture
def server_with_keys(running_with_keys) -> Iterator[Target]:
    """Yield the server with keys; check after the test that it still works."""
    yield from checked_afterwards(running_with_keys)


@pytest.fixture
def marker(tmp_path):
    """Return the path that hostile content would create if any of it were run."""
    return tmp_path / "was-run"
