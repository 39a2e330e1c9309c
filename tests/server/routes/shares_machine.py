"""A state machine that compares `Shares`, or the `new_shares` of a subclass, with a simple model."""

from fractions import Fraction

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from fairlead.generation.shares import Shares

MACHINE_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

TOTAL = 12
amounts = st.sampled_from([0, 1, 2, 3, 5, 8, TOTAL + 1])


class SharesMachine(RuleBasedStateMachine):
    """`account` is the model: the name, amount and `kept` of each holding. The last is revoked first."""

    new_shares = Shares
    holdings = Bundle("holdings")

    @initialize()
    def begin(self):
        self.shares = self.new_shares(TOTAL)
        self.account = {}
        self.arrived = []  # the names with holdings, in order of their arrival

    @rule(target=holdings, name=st.sampled_from("abc"))
    def enter(self, name):
        holding = self.shares.enter(name, owner=object())
        self.account[holding] = [name, 0, False]
        if name not in self.arrived:
            self.arrived.append(name)
        return holding

    @rule(target=holdings, name=st.sampled_from("abc"), amount=amounts, kept=st.booleans())
    def hold(self, name, amount, kept):
        holding = self.enter(name)
        self.grow(holding, amount)
        if kept:
            self.keep(holding)
        return holding

    @rule(holding=holdings, amount=amounts)
    def grow(self, holding, amount):
        if holding not in self.account:
            assert self.shares.grow(holding, amount) == []
        elif not self.account[holding][2]:
            before = {one: list(entry) for one, entry in self.account.items()}
            self.account[holding][1] += amount
            expected = self.expected_revocations(holding)
            revoked = self.shares.grow(holding, amount)
            assert revoked == expected
            if amount <= Fraction(TOTAL, self.names(before)) - self.sum_of(before, holding.name):
                # Its name stays within its share, so only kept holdings of others may get it revoked.
                kept_above = sum(
                    self.sum_of(before, name)
                    for name in "abc"
                    if name != holding.name and self.has_kept(before, name)
                )
                assert kept_above or holding not in revoked

    @rule(holding=holdings, amount=amounts)
    def shrink(self, holding, amount):
        held = self.account[holding][1] if holding in self.account else 0
        if holding in self.account:
            self.account[holding][1] -= min(amount, held)
        self.shares.shrink(holding, min(amount, held))

    @rule(holding=holdings)
    def spare(self, holding):
        self.shares.spare(holding)
        if holding in self.account and not self.account[holding][2]:
            self.account = {holding: self.account.pop(holding), **self.account}

    @rule(holding=holdings)
    def keep(self, holding):
        self.shares.keep(holding)
        if holding in self.account:
            self.account[holding][2] = True

    @rule(holding=consumes(holdings))
    def leave(self, holding):
        self.shares.leave(holding)
        self.remove(holding)

    @rule(holding=holdings)
    def end_and_keep_reference(self, holding):
        self.shares.leave(holding)
        self.remove(holding)

    @invariant()
    def total_equals_the_sum_of_holdings(self):
        assert self.shares.taken == sum(entry[1] for entry in self.account.values()) <= TOTAL
        assert self.shares.holders == self.names(self.account)

    @invariant()
    def ended_holdings_hold_no_bytes(self):
        assert all(not holding.gone for holding in self.account)

    def remove(self, holding):
        self.account.pop(holding, None)
        present = {name for name, _, _ in self.account.values()}
        self.arrived = [name for name in self.arrived if name in present]

    def expected_revocations(self, growing):
        """Revoke holdings in the model by the rules, and return them."""
        revoked = []
        while sum(entry[1] for entry in self.account.values()) > TOTAL:
            share = Fraction(TOTAL, self.names(self.account))
            names = {entry[0] for entry in self.account.values() if not entry[2]}
            above = [name for name in names if self.sum_of(self.account, name) > share]
            victim = growing
            if above:
                most = max(self.sum_of(self.account, name) for name in above)
                largest = next(  # of several equal ones, the first to arrive
                    name for name in self.arrived if name in above and self.sum_of(self.account, name) == most
                )
                victim = [
                    one for one, (name, _, kept) in self.account.items() if name == largest and not kept
                ][-1]
            self.remove(victim)
            revoked.append(victim)
        return revoked

    def names(self, account):
        return len({name for name, _, _ in account.values()})

    def sum_of(self, account, account_name):
        return sum(amount for name, amount, _ in account.values() if name == account_name)

    def has_kept(self, account, account_name):
        return any(kept for name, _, kept in account.values() if name == account_name)
