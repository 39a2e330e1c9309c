"""Holding a lease: the tasks and timeouts around `Contender`."""

import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import structlog
import trio

from fairlead.base.backoff import Backoff
from fairlead.distributed.lease.contender import Contender, LeaseRecord, Read, Replace, Wait
from fairlead.distributed.lease.term import Term, running_time_s

logger = structlog.get_logger("fairlead.distributed.lease")

TIMEOUTS = 4  # per duration: how long one operation of a store may take
FIRST_PAUSE = 1 / 20  # of the duration, after a failure; it doubles


class LeaseLost(Exception):
    """This process is no longer the leader."""


class StoreFailed(Exception):
    """An operation of a store has failed, or has no reply. It may have been executed."""


def reason_of(error: BaseException) -> str:
    """Return the text of an error of a client, or of what has caused it: some have none of their own."""
    cause: BaseException | None = error
    while cause is not None and not str(cause):
        cause = cause.__cause__ or cause.__context__
    return str(cause) if cause is not None else type(error).__name__


class LeaseStore(Protocol):
    """Where the record of a lease is. Both methods raise `StoreFailed`."""

    async def read(self) -> LeaseRecord | None:
        """Return the record, or None if there is none."""
        ...

    async def replace(self, write: Replace) -> LeaseRecord | None:
        """Write a record atomically if `write.previous` is in the store, and return it; else None."""
        ...


class Lease(Protocol):
    """The right to be the only leader."""

    async def hold(self, *, task_status: trio.TaskStatus[Term] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until this process is the leader, report the `Term`, and renew the lease until it is lost.

        Then raise `LeaseLost`, which cancels the nursery in which it was started. Cancelling this ends the
        term and releases the lease.
        """
        ...


class LocalLease:
    """The lease of a dispatcher without standbys, which is the leader from its start."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    async def hold(self, *, task_status: trio.TaskStatus[Term] = trio.TASK_STATUS_IGNORED) -> None:
        """Report a term that does not end."""
        term = Term(self._epoch)
        task_status.started(term)
        try:
            await trio.sleep_forever()
        finally:
            term.end()


class StoredLease:
    """A lease whose record is in a store.

    connect: opens a session; used again after each failure.
    duration_s: how long a term holds without being renewed.
    holder: the name of this process; None: a random one.
    least_epoch: a bound for new epochs, in case a store has lost its record.
    now_s: the clock by which terms end.
    waited_s: the clock that measures how long a record has not changed.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[LeaseStore]],
        *,
        duration_s: float,
        holder: str | None = None,
        least_epoch: Callable[[], int] = lambda: 1,
        now_s: Callable[[], float] = running_time_s,
        waited_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._duration_s = duration_s
        self._now_s = now_s
        holder = holder or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._contender = Contender(holder, duration_s, now_s, least_epoch=least_epoch, waited_s=waited_s)
        self._is_reachable = True

    async def hold(self, *, task_status: trio.TaskStatus[Term] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Lease`. Failures of the store are logged, and tried again."""
        contender = self._contender
        try:
            await self._acquire(task_status)
            assert contender.term is not None
            with trio.CancelScope() as scope:
                await self._renew(scope)
            logger.warning("lease lost", reason="it was not renewed in time")
            contender.may_hold = False
            raise LeaseLost("the lease was not renewed in time")
        finally:
            contender.lose()
            if contender.may_hold:
                with trio.CancelScope(shield=True, deadline=self._soon(2)):
                    await self._release()

    async def _acquire(self, task_status: trio.TaskStatus[Term]) -> None:
        """Return when this process is the leader and has reported it."""
        backoff = Backoff(self._duration_s * FIRST_PAUSE, self._duration_s)
        while self._contender.term is None:
            try:
                async with self._session() as store:
                    while self._contender.term is None:
                        await self._step(store)
                        backoff.reset()
            except StoreFailed as error:
                self._failed(error)
                await trio.sleep(backoff.take())
        term = self._contender.term
        if not term.is_valid():
            raise LeaseLost("the lease had expired when the reply arrived")
        logger.info("lease acquired", epoch=term.epoch)
        task_status.started(term)

    async def _renew(self, scope: trio.CancelScope) -> None:
        """Renew the lease until the term ends, which cancels the scope. Raises `LeaseLost`."""
        term = self._contender.term
        assert term is not None
        while term.is_valid():
            scope.deadline = trio.current_time() + term.valid_until_s - self._now_s()
            try:
                async with self._session() as store:
                    while term.is_valid():
                        scope.deadline = trio.current_time() + term.valid_until_s - self._now_s()
                        await self._step(store)
            except StoreFailed as error:
                self._failed(error)
                await trio.sleep(self._duration_s * FIRST_PAUSE)

    def _session(self) -> AbstractAsyncContextManager[LeaseStore]:
        return self._connect()

    async def _step(self, store: LeaseStore) -> None:
        """Do what the contender decides. Raises `LeaseLost` and `StoreFailed`."""
        action = self._contender.next_action()
        if isinstance(action, Wait):
            await trio.sleep(action.wait_s)
            return
        record = None
        with trio.move_on_at(self._soon()) as bound:
            record = await (store.read() if isinstance(action, Read) else store.replace(action))
        if bound.cancelled_caught:
            raise StoreFailed(f"no reply within {self._duration_s / TIMEOUTS:g} s")
        if not self._is_reachable:
            self._is_reachable = True
            logger.info("lease store reached again")
        if isinstance(action, Replace):
            self._contender.replaced(record)
        elif not self._contender.received(record):
            reason = "another process has the lease" if record and record.holder else "its record is gone"
            logger.warning("lease lost", reason=reason)
            raise LeaseLost(reason)

    def _failed(self, error: StoreFailed) -> None:
        self._contender.failed()
        if self._is_reachable:
            self._is_reachable = False
            logger.warning("lease store failed", reason=str(error))

    async def _release(self) -> None:
        """Free the record, so that a standby need not wait. The term has ended before."""
        try:
            async with self._connect() as store:
                write = self._contender.release(await store.read())
                if write is not None and await store.replace(write) is not None:
                    logger.info("lease released", epoch=write.epoch)
            self._contender.may_hold = False
        except StoreFailed as error:
            logger.warning("lease not released", reason=str(error))

    def _soon(self, times: float = 1) -> float:
        deadline = trio.current_time() + times * self._duration_s / TIMEOUTS
        assert math.isfinite(deadline)
        return deadline
