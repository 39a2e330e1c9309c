"""The decisions of one contender for a lease. Pure: times and replies go in, the next action comes out.

Why at most one contender is the leader at a time, as long as clocks run at about the same rate:

- A leader is valid until `duration - margin` after it *sent* its last successful write.
- Another contender writes only if the record has not changed for `duration` since it *received* the record,
  which was after that write. Its own write fails if the record has changed meanwhile.
- Clocks of different machines are never compared. A term ends by a clock that counts the time in which the
  machine is suspended; waiting is measured by one that does not. If either jumps, a term is only shorter.
- A store that has lost its record cannot say whether a leader is left. So a record that replaces a missing
  one is only a claim, with epoch 0; nothing leads before it has been unchanged for `duration`.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from fairlead.distributed.lease.term import Term

MARGIN = 0.1  # of the duration, for clocks of different rates and for the time between check and act
RENEWALS = 4  # per duration
POLLS = 6  # per duration
LEAST_WAIT_S = 0.001  # a clock may stand still during a shorter one


class LeaseRecord(NamedTuple):
    """What a store has.

    holder: who has the lease; empty: it was released.
    epoch: the number of the term; 0: a claim, which was written where there was no record.
    duration_s: how long it holds without being written again.
    version: what each write changes.
    """

    holder: str
    epoch: int
    duration_s: float
    version: str


class Read(NamedTuple):
    """Read the record."""


class Replace(NamedTuple):
    """Write a record.

    previous: it is written only if this one is still in the store; None: if there is none.
    holder: who has the lease.
    epoch: the number of the term.
    duration_s: how long it holds.
    """

    previous: LeaseRecord | None
    holder: str
    epoch: int
    duration_s: float


class Wait(NamedTuple):
    """Do nothing for so long."""

    wait_s: float


class Contender:
    """One process that can become the leader. `term` is its term as leader, or None.

    holder: its name.
    duration_s: how long its terms hold without being renewed.
    now_s: the clock by which terms end.
    least_epoch: a bound for new epochs, in case a store has lost its record.
    waited_s: the clock that measures how long a record has not changed.

    After each `Read` or `Replace` one of `received`, `replaced` and `failed` must be called. `may_hold` is
    whether the store may name this process as the holder.
    """

    def __init__(
        self,
        holder: str,
        duration_s: float,
        now_s: Callable[[], float],
        *,
        least_epoch: Callable[[], int] = lambda: 1,
        waited_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._duration_s = duration_s
        self._valid_s = duration_s * (1 - MARGIN)
        self._now_s = now_s
        self._waited_s = waited_s
        self._least_epoch = least_epoch
        self.term: Term | None = None
        self.may_hold = False
        self._record: LeaseRecord | None = None
        self._is_known = False  # whether `_record` is what the store had last
        self._is_fresh = False  # whether it was read since the last wait
        self._seen_s: float | None = None  # when the record was first received, by the clock of waiting
        self._sent_s = 0.0
        self._highest = 0  # of all epochs seen

    def next_action(self) -> Read | Replace | Wait:
        """Return what to do now. A leader must first check that its term is valid."""
        now_s = self._now_s()
        if self.term is not None:
            renewal_s = self._sent_s + self._duration_s / RENEWALS
            if not self._is_known:
                return Read()
            if now_s < renewal_s:
                return Wait(max(renewal_s - now_s, LEAST_WAIT_S))
            return self._write(now_s, self.term.epoch)
        if not self._is_fresh:
            self._is_fresh = True
            return Read()
        self._is_fresh = False
        if not self._is_known or self._waited_s() < self._free_s():
            return Wait(self._duration_s / POLLS)
        if self._record is None:
            return self._write(now_s, 0)
        return self._write(now_s, max(self._highest + 1, self._least_epoch()))

    def received(self, record: LeaseRecord | None) -> bool:
        """Handle the record that was read. Return whether this process may go on: False if its term ended."""
        if self._seen_s is None or record != self._record:
            self._seen_s = self._waited_s()
        self._record = record
        self._is_known = True
        self._highest = max(self._highest, record.epoch if record else 0)
        if self.term is None:
            return True
        # The record has a lower epoch than the term if that was raised since the last write.
        is_ours = record is not None and record.holder == self._holder and 0 < record.epoch <= self.term.epoch
        if not is_ours:
            self.may_hold = False
            self.lose()
        return is_ours

    def replaced(self, record: LeaseRecord | None) -> None:
        """Handle the reply to a write: the new record, or None if another process has changed it."""
        if record is None:
            self._is_known = False
            self._is_fresh = False
            return
        self._record, self._is_known = record, True
        self._seen_s = self._waited_s()
        self._highest = max(self._highest, record.epoch)
        valid_until_s = self._sent_s + self._valid_s
        if self.term is not None:
            self.term.extend(valid_until_s)
        elif record.epoch:
            self.term = Term(record.epoch, valid_until_s, self._now_s)

    def failed(self) -> None:
        """Handle an operation without a reply, which the store may have executed."""
        self._is_known = False
        self._is_fresh = False

    def lose(self) -> None:
        """End the term."""
        if self.term is not None:
            self.term.end()
            self.term = None
        self._is_fresh = False

    def release(self, record: LeaseRecord | None) -> Replace | None:
        """Return the write that frees the lease, given the record of the store; None if another has it."""
        assert self.term is None, "a lease must not be released before its term has ended"
        if record is None or record.holder != self._holder:
            return None
        return Replace(record, "", record.epoch, record.duration_s)

    def _free_s(self) -> float:
        """Return the time from which the record may be replaced."""
        assert self._seen_s is not None
        record = self._record
        if record is None or (record.epoch and record.holder in ("", self._holder)):
            return self._seen_s
        return self._seen_s + max(self._duration_s, record.duration_s)

    def _write(self, now_s: float, epoch: int) -> Replace:
        self._sent_s = now_s
        self.may_hold = True
        return Replace(self._record, self._holder, epoch, self._duration_s)
