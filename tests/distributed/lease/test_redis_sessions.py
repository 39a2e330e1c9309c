"""How a session with Redis ends when several tasks of its client fail at the same time."""

from contextlib import asynccontextmanager

import pytest

pytest.importorskip("coredis")

import coredis
from coredis.exceptions import ConnectionError as RedisConnectionError

from fairlead.distributed.lease import LeaseLost, redis
from fairlead.distributed.lease.lease import StoreFailed


@pytest.mark.parametrize(
    ("of_block", "of_client", "expected"),
    [
        (StoreFailed("no reply"), [], StoreFailed("no reply")),
        (StoreFailed("no reply"), [RedisConnectionError("reset")] * 2, StoreFailed("no reply")),
        (
            OSError("unreachable"),
            [RedisConnectionError("reset")],
            StoreFailed("Redis: unreach"),
        ),
        (LeaseLost("another leads"), [], LeaseLost("another leads")),
        (
            LeaseLost("another leads"),
            [RedisConnectionError("reset")],
            LeaseLost("another leads"),
        ),
        (KeyError("bug"), [StoreFailed("no reply")], KeyError("bug")),
    ],
)
async def test_session_ends_with_one_exception(monkeypatch, of_block, of_client, expected):
    @asynccontextmanager
    async def client(*_arguments, **_options):
        try:
            yield
        except (StoreFailed, OSError, LeaseLost, KeyError) as error:
            raise ExceptionGroup("tasks", [ExceptionGroup("block", [error]), *of_client]) from None

    monkeypatch.setattr(coredis, "Redis", client)
    with pytest.raises(type(expected), match=str(expected)):
        async with redis.connect("redis://localhost", "key"):
            raise of_block
