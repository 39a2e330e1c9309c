"""Budgets beside a plain oracle, and bursts against their bound."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlead.base.config import ApiKey, Budget, BudgetsConfig, CommandConfig, Config, Price
from fairlead.base.config.spelling import ConfigError
from fairlead.base.config.store import read_amount
from fairlead.base.errors import BudgetExceeded
from fairlead.router.quotas.access import key_id
from fairlead.router.quotas.budgets import Budgets, BudgetShare, Reservation, shares_of, subjects_of
from fairlead.store.records import Spent

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
DAY = 86_400.0
MILLION = 1_000_000


def share(subject="key:key-1", **budget):
    return (BudgetShare(subject, Budget(**budget)),)


def spend(budgets, shares, prompt, answer, now=NOON, price=None):
    reservation = budgets.reserve(shares, price, prompt, now)
    reservation.charge_answer(answer, 0)
    reservation.end(now)


def test_price_counts_cached_tokens_apart():
    price = Price(input=0.15, output=0.6, cached=0.02)
    assert price.nano(MILLION, 0, 0) == 150_000_000
    assert price.nano(MILLION, MILLION, 0) == 20_000_000
    assert price.nano(0, 0, MILLION) == 600_000_000
    assert Price(input=2).nano(10, 10, 5) == 20_000  # without a price of its own
    config = Config(
        models=(CommandConfig(name="far", cmd=("x",), price=price),), prices={"far": Price(), "b": price}
    )
    assert config.price_of("far") == config.price_of("b") == price
    assert config.price_of("c") is None


@pytest.mark.parametrize(
    ("text", "tokens"), [("2M", 2 * MILLION), ("500k", 500_000), ("1.5G", 1_500_000_000), ("7", 7), (7, 7)]
)
def test_amounts_have_factors(text, tokens):
    assert read_amount(text) == tokens


@pytest.mark.parametrize("text", ["", "M", "-1", "1.0000001k", "2 T", "nan", "1e9"])
def test_faulty_amounts_are_refused(text):
    with pytest.raises(ValueError, match="500k"):
        read_amount(text)


@pytest.mark.parametrize("budget", [{"cost_per_day": math.inf}, {"cost_per_day": 0}, {"tokens_per_day": 0}])
def test_faulty_budgets_are_refused(budget):
    with pytest.raises(ConfigError, match="budget"):
        Config(models=(), api_keys=(ApiKey("k", budget=Budget(**budget)),))


def test_shares_are_those_of_key_user_and_team_and_none_without_a_key():
    budget = Budget(tokens_per_day=5)
    key = ApiKey("k", user="ana", team="research", budget=budget)
    config = BudgetsConfig(users={"ana": budget, "ben": budget}, teams={"research": budget, "": budget})
    subjects = [each.subject for each in shares_of(key, "ana", config)]
    assert subjects == [f"key:{key_id(key)}", "user:ana", "team:research"]
    assert shares_of(ApiKey("k2"), "portal/x", config) == ()
    assert shares_of(None, "ana", config) == ()
    assert set(subjects_of([key, ApiKey("k2")], config)) == {
        *(f"key:{key_id(key)}", "user:ana", "user:ben", "team:research", "team:")
    }


def test_price_of_a_batch_is_less_by_its_discount():
    price = Price(input=0.4, output=1, cached=0.1, batch_discount=0.5)
    assert price.of_batch().nano(MILLION, 500_000, MILLION) == 625_000_000
    assert Price(input=1, batch_discount=1).of_batch().nano(MILLION, 0, MILLION) == 0
    config = Config(models=(), prices={"a": price})
    assert (config.price_of("a"), config.price_of("a", is_batch=True)) == (price, price.of_batch())
    for discount in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="batchDiscount"):
            Config(models=(), prices={"a": Price(batch_discount=discount)})


def test_stored_budgets_replace_those_of_the_configuration_and_batches_count_for_their_user():
    key = ApiKey("k", user="ana", team="research")
    config = BudgetsConfig(
        users={"ana": Budget(tokens_per_day=5)},
        teams={"research": Budget(tokens_per_day=6)},
        batch_discount=0.5,
    )
    stored = {"user:ana": Budget(tokens_per_day=7), "team:ops": Budget(tokens_per_day=8)}
    expected = [("user:ana", 7, 0.5), ("team:research", 6, 0.5)]
    found = shares_of(key, "batch:ana", config, stored, is_batch=True)
    assert [(each.subject, each.budget.tokens_per_day, each.token_share) for each in found] == expected
    assert shares_of(ApiKey("k2", user="batch:ana"), "batch:ana", config, stored) == ()
    assert set(subjects_of([], config, stored)) == {"user:ana", "team:research", "team:ops"}


def test_discounted_tokens_are_given_back_as_they_were_reserved():
    budgets = Budgets()
    (plain,) = share(tokens_per_day=10)
    shares = (BudgetShare(plain.subject, plain.budget, 0.3),)
    for _ in range(5):
        spend(budgets, shares, 3, 0)  # 0.9 tokens count as one
    assert _spent_tokens(budgets) == 5
    reservation = budgets.reserve(shares, None, 10, NOON)
    assert _spent_tokens(budgets) == 8
    reservation.refund()
    reservation.end(NOON)
    assert _spent_tokens(budgets) == 5


def _spent_tokens(budgets):
    return budgets._of("2026-11-28", "key:key-1").tokens


def test_refusal_names_the_budget_that_renews_last_and_its_time():
    budgets, shares = Budgets(), share(tokens_per_day=10) + share("team:ops", tokens_per_month=10)
    spend(budgets, shares, 5, 5)
    with pytest.raises(BudgetExceeded) as caught:
        budgets.reserve(shares, None, 1, NOON)
    assert "10 tokens a month of its team; it renews at 2026-12-01T00:00:00Z" in caught.value.message
    assert caught.value.retry_after_s == 2.5 * DAY
    budgets.reserve(share(tokens_per_day=10), None, 1, NOON + DAY / 2)  # the next day


def test_warning_begins_at_four_fifths():
    budgets, shares = Budgets(), share(tokens_per_day=100)
    spend(budgets, shares, 40, 39)
    assert budgets.warning(shares, NOON) == ""
    spend(budgets, shares, 1, 0)
    assert (
        budgets.warning(shares, NOON)
        == "80% of 100 tokens a day of this API key, renews at 2026-11-29T00:00:00Z"
    )


def test_what_was_reserved_yesterday_is_spent_today():
    budgets, shares = Budgets(), share(tokens_per_day=10)
    reservation = budgets.reserve(shares, None, 9, NOON)
    reservation.charge_answer(1, 0)
    reservation.end(NOON + DAY)
    with pytest.raises(BudgetExceeded):
        budgets.reserve(shares, None, 1, NOON + DAY)
    budgets.reserve(shares, None, 10, NOON + 2 * DAY)


def test_first_sums_of_the_store_are_added_and_later_ones_are_a_lower_bound():
    budgets, shares = Budgets(), share(tokens_per_day=100)
    spend(budgets, shares, 10, 10)  # before the store answered
    budgets.restore([Spent("2026-11-28", "key:key-1", 30, 0)])
    assert "50" in str(budgets.warning(share(tokens_per_day=50), NOON))
    budgets.restore([Spent("2026-11-28", "key:key-1", 50, 0)])  # which has now what was spent here
    budgets.reserve(shares, None, 50, NOON).end(NOON)
    budgets.restore([Spent("2026-11-28", "key:key-1", 70, 0)])  # of another server
    with pytest.raises(BudgetExceeded):
        budgets.reserve(shares, None, 31, NOON)
    budgets.reserve(shares, None, 30, NOON)


def test_a_new_day_forgets_the_days_before():
    budgets = Budgets()
    for day in range(40):
        spend(budgets, share(f"key:{day}", tokens_per_day=5, tokens_per_month=5), 1, 1, NOON + day * DAY)
    assert len(budgets._amounts) <= 2 * 31


class BurstMachine(RuleBasedStateMachine):
    """Jobs arrive in bursts, take one of `SEATS` seats, and end, are refused or are cancelled."""

    SEATS, LIMIT, LONGEST = 3, 100, 40
    budgets_class = Budgets
    reservation_class = Reservation

    def __init__(self):
        super().__init__()
        self.budgets = self.budgets_class()
        self.shares = share(tokens_per_day=self.LIMIT, cost_per_month=self.LIMIT / MILLION)
        self.price = Price(input=1, output=1)
        self.waiting, self.seated = [], []
        self.spent = 0

    @rule(prompt=st.integers(1, 30), number=st.integers(1, 6))
    def burst_arrives(self, prompt, number):
        for _ in range(number):
            reserved = sum(each for _, each in self.waiting + self.seated)
            try:
                self.budgets.check(self.shares, NOON, tokens=prompt, cost_nano=1000 * prompt)
                reservation = self.reservation_class(self.budgets, self.shares, self.price, prompt, NOON)
            except BudgetExceeded:
                assert self.spent + reserved + prompt > self.LIMIT
            else:
                assert self.spent + reserved + prompt <= self.LIMIT
                self.waiting.append((reservation, prompt))

    @precondition(lambda self: self.waiting and len(self.seated) < self.SEATS)
    @rule()
    def job_takes_a_seat(self):
        reservation, prompt = self.waiting.pop(0)
        try:
            reservation.check(NOON)
        except BudgetExceeded:
            reservation.refund()
            reservation.end(NOON)
        else:
            self.seated.append((reservation, prompt))

    @precondition(lambda self: self.seated)
    @rule(tokens=st.integers(0, LONGEST), index=st.integers(0, 2))
    def answer_ends(self, tokens, index):
        reservation, prompt = self.seated.pop(index % len(self.seated))
        reservation.charge_answer(tokens, 0)
        reservation.end(NOON)
        self.spent += prompt + tokens

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9))
    def client_leaves(self, index):
        reservation, _ = self.waiting.pop(index % len(self.waiting))
        reservation.end(NOON)

    @invariant()
    def budget_is_exceeded_by_one_answer_a_seat_at_most(self):
        assert self.spent <= self.LIMIT + self.SEATS * self.LONGEST

    @invariant()
    def amounts_are_those_of_the_oracle(self):
        tokens = self.spent + sum(prompt for _, prompt in self.waiting + self.seated)
        for period in ("2026-11-28", "2026-11"):
            amounts = self.budgets._of(period, "key:key-1")
            assert (amounts.tokens, amounts.cost_nano) == (tokens, 1000 * tokens)


TestBursts = BurstMachine.TestCase


class NeverChecksAgain(Reservation):
    def check(self, now):
        pass


class KeepsWhatWasReserved(Reservation):
    def end(self, now):
        self._budgets.add(self._shares, *self._spent, now)


class ForgetsToReserve(Reservation):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._budgets.add(self._shares, -self._reserved[0], -self._reserved[1], self._at)
        self._reserved = (0, 0)


@pytest.mark.parametrize("mutant", [NeverChecksAgain, KeepsWhatWasReserved, ForgetsToReserve])
def test_machine_catches_mutants(mutant):
    class Broken(BurstMachine):
        reservation_class = mutant

    Broken.TestCase.settings = settings(phases=[Phase.generate], max_examples=300)
    with pytest.raises(Exception):  # noqa: B017 - an assertion, perhaps in a group
        Broken.TestCase("runTest").runTest()
