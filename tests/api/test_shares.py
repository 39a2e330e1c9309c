"""What shares promise; then a machine against a plain account of the rules, and mutants that it catches."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from api.shares_machine import MACHINE_SETTINGS, SharesMachine
from fairlead.api.shares import Shares


def holding(shares, name, amount):
    held = shares.enter(name)
    assert shares.grow(held, amount) == []
    return held


def test_one_holder_may_have_all():
    shares = Shares(10)
    held = holding(shares, "a", 10)
    assert shares.grow(held, 1) == [held]
    assert shares.taken == 0


def test_the_largest_holder_loses_what_it_took_last():
    shares = Shares(10)
    first, last = holding(shares, "a", 4), holding(shares, "a", 4)
    small = holding(shares, "b", 2)
    assert shares.grow(small, 1) == [last]
    assert (first.gone, last.gone, small.gone, shares.taken) == (False, True, False, 7)


def test_a_holder_above_its_share_loses_to_itself():
    shares = Shares(10)
    small = holding(shares, "a", 4)
    large = holding(shares, "b", 6)
    assert shares.grow(large, 1) == [large]
    assert not small.gone


def test_as_many_are_taken_back_as_are_needed():
    shares = Shares(10)
    held = [holding(shares, "a", 2) for _ in range(5)]
    assert shares.grow(shares.enter("b"), 5) == [held[4], held[3], held[2]]


def test_what_is_kept_is_not_taken_back():
    shares = Shares(10)
    kept, last = holding(shares, "a", 8), holding(shares, "a", 2)
    shares.keep(kept)
    newcomer = shares.enter("b")
    assert shares.grow(newcomer, 2) == [last]
    assert shares.grow(newcomer, 1) == [newcomer]


def test_what_is_gone_is_given_back_once():
    shares = Shares(10)
    held = holding(shares, "a", 10)
    shares.leave(held)
    shares.leave(held)
    assert (shares.taken, shares.holders, shares.grow(held, 5)) == (0, 0, [])


TestShares = SharesMachine.TestCase
TestShares.settings = MACHINE_SETTINGS


class TakesFirst(Shares):
    """Takes back what the largest holder took first."""

    def _last_of_largest(self):
        found = super()._last_of_largest()
        return found and next(iter(self._holders[found.name].revocable))


class TakesFromGrowing(Shares):
    """Takes back from whoever asks."""

    def _last_of_largest(self):
        return None


class TakesFromSmall(Shares):
    """Takes back from anybody who can lose something."""

    def _last_of_largest(self):
        losing = [holder for holder in self._holders.values() if holder.revocable]
        return next(reversed(losing[-1].revocable)) if losing else None


class TakesKept(Shares):
    """Takes back what is kept."""

    def keep(self, holding):
        holding.kept = not holding.gone


class ForgetsToGiveBack(Shares):
    """Does not give back what was kept."""

    def leave(self, holding):
        taken = self.taken
        super().leave(holding)
        if holding.kept:
            self.taken = taken


class IgnoresShares(Shares):
    """Takes from the largest holder that can lose something, though it is within its share."""

    def _last_of_largest(self):
        losing = [holder for holder in self._holders.values() if holder.revocable]
        largest = max(losing, key=lambda holder: holder.amount, default=None)
        return next(reversed(largest.revocable)) if largest else None


@pytest.mark.parametrize(
    "mutant", [TakesFirst, TakesFromGrowing, TakesFromSmall, TakesKept, ForgetsToGiveBack, IgnoresShares]
)
def test_the_machine_catches_a_mutant(mutant):
    class Machine(SharesMachine):
        new_shares = mutant

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            Machine, settings=settings(MACHINE_SETTINGS, phases=[Phase.generate], max_examples=4000)
        )
