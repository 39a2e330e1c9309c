"""The record of a lease in Redis or Valkey: a key without expiry, which a script replaces if it is unchanged.

Since the key does not expire, the clock of the server has no effect. Needs the extra redis.
"""

import secrets
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from fairlead.base.config import ConfigError
from fairlead.distributed.lease.contender import LeaseRecord, Replace
from fairlead.distributed.lease.lease import StoreFailed, reason_of

_REPLACE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class _Stored(msgspec.Struct, rename="camel"):
    """The value of the key, as JSON. `nonce` makes each one different."""

    holder: str
    epoch: int
    duration_s: float
    nonce: str


class RedisStore:
    """A session with a server, by a client of coredis."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key

    async def read(self) -> LeaseRecord | None:
        """Return the record, or None if there is none."""
        with _Failures():
            text = await self._client.get(self._key)
        return None if text is None else _record(text, self._key)

    async def replace(self, write: Replace) -> LeaseRecord | None:
        """Write a record atomically if `write.previous` is in the store, and return it; else None."""
        stored = _Stored(write.holder, write.epoch, write.duration_s, secrets.token_hex(8))
        text = msgspec.json.encode(stored).decode()
        before = write.previous.version if write.previous else ""
        with _Failures():
            done = await self._client.eval(_REPLACE, [self._key], [before, text])
        return LeaseRecord(write.holder, write.epoch, write.duration_s, text) if done == 1 else None


class _Failures:
    """Raise `StoreFailed` for an error of coredis or of the network."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        from coredis.exceptions import RedisError

        if isinstance(error, RedisError | OSError):
            raise StoreFailed(f"Redis: {reason_of(error)}") from error


@asynccontextmanager
async def connect(url: str, key: str) -> AsyncIterator[RedisStore]:
    """Open a session. With rediss:// the certificate and the host's name are checked.

    Its only network operations are those of the store's methods, which callers give a time limit. Raises
    `StoreFailed`.
    """
    import coredis
    from coredis.retry import NoRetryPolicy

    parts = urlsplit(url)
    client = coredis.Redis(
        parts.hostname or "localhost",
        parts.port or 6379,
        int(parts.path.strip("/") or 0),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        decode_responses=True,
        ssl_context=ssl.create_default_context() if parts.scheme == "rediss" else None,
        verify_version=False,
        max_connections=1,
        retry_policy=NoRetryPolicy(),
    )
    try:
        async with client:
            yield RedisStore(client, key)
    except BaseExceptionGroup as group:
        # The client's nursery also wraps the errors of the block.
        raise _cause_of(group) from None


def _cause_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of a session: `StoreFailed` if only the connection failed, perhaps in several tasks.

    Otherwise the one other exception of the group, or a group of the others.
    """
    from coredis.exceptions import RedisError

    failures, others = group.split((StoreFailed, RedisError, OSError))
    error: BaseException | None = others or failures
    while isinstance(error, BaseExceptionGroup) and (others is None or len(error.exceptions) == 1):
        error = error.exceptions[0]
    assert error is not None
    if others is not None or isinstance(error, StoreFailed):
        return error
    return StoreFailed(f"Redis: {reason_of(error)}")


def least_epoch() -> int:
    """Return the Unix time in seconds: a Redis that has lost its data must not repeat earlier epochs."""
    return int(time.time())


def require_coredis() -> None:
    """Raise `ConfigError` if the extra is not installed."""
    try:
        import coredis  # noqa: F401
    except ImportError as error:
        raise ConfigError("lease.redis: needs coredis: pip install 'fairlead[redis]'") from error


def _record(text: str, key: str) -> LeaseRecord:
    try:
        stored = msgspec.json.decode(text, type=_Stored)
    except msgspec.DecodeError as error:
        raise StoreFailed(f"Redis: the key {key} is not a lease of Fairlead") from error
    return LeaseRecord(stored.holder, stored.epoch, stored.duration_s, text)
