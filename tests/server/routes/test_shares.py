"""The rules of `Shares` by example, a state machine with a simple model, and mutants that it catches."""

import pytest
from hypothesis.stateful import run_state_machine_as_test

from fairlead.generation.shares import Shares
from first_failure import until_first_failure
from server.routes.shares_machine import MACHINE_SETTINGS, SharesMachine


def holding(shares, name, amount):
    account = shares.enter(name)
    assert shares.grow(account, amount) == []
    return account


def test_one_holder_may_have_the_total():
    shares = Shares(10)
    account = holding(shares, "a", 10)
    assert shares.grow(account, 1) == [account]
    assert shares.taken == 0


def test_largest_holder_loses_its_newest_holding():
    shares = Shares(10)
    first, last = holding(shares, "a", 4), holding(shares, "a", 4)
    small = holding(shares, "b", 2)
    assert shares.grow(small, 1) == [last]
    assert (first.gone, last.gone, small.gone, shares.taken) == (False, True, False, 7)


def test_holder_that_grows_above_its_share_loses_its_own_holding():
    shares = Shares(10)
    small = holding(shares, "a", 4)
    large = holding(shares, "b", 6)
    assert shares.grow(large, 1) == [large]
    assert not small.gone


def test_as_many_holdings_are_revoked_as_are_needed():
    shares = Shares(10)
    account = [holding(shares, "a", 2) for _ in range(5)]
    assert shares.grow(shares.enter("b"), 5) == [account[4], account[3], account[2]]


def test_kept_holding_is_not_revoked():
    shares = Shares(10)
    kept, last = holding(shares, "a", 8), holding(shares, "a", 2)
    shares.keep(kept)
    newcomer = shares.enter("b")
    assert shares.grow(newcomer, 2) == [last]
    assert shares.grow(newcomer, 1) == [newcomer]


def test_small_holder_loses_nothing_for_what_others_keep():
    shares = Shares(10)
    shares.keep(holding(shares, "a", 8))
    small = holding(shares, "b", 2)
    newcomer = shares.enter("c")
    assert shares.grow(newcomer, 1) == [newcomer]
    assert not small.gone


def test_holding_is_released_once():
    shares = Shares(10)
    account = holding(shares, "a", 10)
    shares.leave(account)
    shares.leave(account)
    assert (shares.taken, shares.holders, shares.grow(account, 5)) == (0, 0, [])


def test_holding_that_shrank_leaves_room_for_others():
    shares = Shares(10)
    first = holding(shares, "a", 8)
    shares.shrink(first, 6)
    second = holding(shares, "b", 8)
    assert (first.gone, second.gone, shares.taken) == (False, False, 10)


def test_spared_holding_is_the_last_that_its_holder_loses():
    shares = Shares(10)
    old, middle, new = (holding(shares, "a", 3) for _ in range(3))
    shares.spare(new)
    other = holding(shares, "b", 1)
    assert shares.grow(other, 1) == [middle]
    assert shares.grow(other, 3) == [old]
    assert not new.gone


TestShares = SharesMachine.TestCase
TestShares.settings = MACHINE_SETTINGS


class TakesFirst(Shares):
    """Revokes the oldest holding of the largest holder."""

    def _last_of_largest(self):
        found = super()._last_of_largest()
        return found and next(iter(self._holders[found.name].revocable))


class TakesFromGrowing(Shares):
    """Revokes the holding that grows."""

    def _last_of_largest(self):
        return None


class TakesFromSmall(Shares):
    """Revokes from any holder with a revocable holding."""

    def _last_of_largest(self):
        losing = [holder for holder in self._holders.values() if holder.revocable]
        return next(reversed(losing[-1].revocable)) if losing else None


class TakesKept(Shares):
    """Revokes kept holdings."""

    def keep(self, holding):
        holding.kept = not holding.gone


class ForgetsToGiveBack(Shares):
    """Does not release kept holdings."""

    def leave(self, holding):
        taken = self.taken
        super().leave(holding)
        if holding.kept:
            self.taken = taken


class ShrinksTotalOnly(Shares):
    """Releases a part of the total, but not of its holder's amount."""

    def shrink(self, holding, amount):
        held = self._holders.get(holding.name)
        super().shrink(holding, amount)
        if held is not None and not holding.gone:
            held.amount += amount


class SparesNothing(Shares):
    """Does not change which holding is revoked first."""

    def spare(self, holding):
        """Change nothing."""


class SparesAsNewest(Shares):
    """Makes a spared holding the newest."""

    def spare(self, holding):
        if not (holding.gone or holding.kept):
            self._holders[holding.name].revocable.move_to_end(holding)


class TakesFromSmallest(Shares):
    """Revokes from the smallest holder, if the largest is above its share."""

    def _last_of_largest(self):
        if super()._last_of_largest() is None:
            return None
        losing = [holder for holder in self._holders.values() if holder.revocable]
        return next(reversed(min(losing, key=lambda holder: holder.amount).revocable))


class IgnoresShares(Shares):
    """Revokes from the largest holder with a revocable holding, even if it is within its share."""

    def _last_of_largest(self):
        losing = [holder for holder in self._holders.values() if holder.revocable]
        largest = max(losing, key=lambda holder: holder.amount, default=None)
        return next(reversed(largest.revocable)) if largest else None


@pytest.mark.parametrize(
    "mutant",
    [
        TakesFirst,
        TakesFromGrowing,
        TakesFromSmall,
        TakesFromSmallest,
        TakesKept,
        ForgetsToGiveBack,
        IgnoresShares,
        ShrinksTotalOnly,
        SparesNothing,
        SparesAsNewest,
    ],
)
def test_machine_catches_a_mutant(mutant):
    class Machine(SharesMachine):
        new_shares = mutant

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Machine, settings=until_first_failure(MACHINE_SETTINGS, max_examples=4000))
