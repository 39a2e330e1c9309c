"""What a finished job adds to usage: its time, its user, whether it was a batch's, and what it costs."""

import pytest

from fairlead.base.config import BudgetsConfig, Config, Price
from fairlead.base.errors import Displaced
from fairlead.generation.usage import UsageRecorder
from fairlead.store.journal import UsageJournal
from fairlead.store.store import UsageWriter
from generation.metrics.sources import timeline

HOUR = 1_795_870_800
PRICE = Price(1, 1, batch_discount=0.5)


def recorded(**job):
    """Return the row that a job of 8 tokens adds."""
    config = Config(models=(), prices={"m": PRICE}, budgets=BudgetsConfig(batch_discount=0.25))
    writer = UsageWriter(UsageJournal())
    recorder = UsageRecorder(
        writer,
        price_of=config.price_of,
        budgets=lambda: config.budgets,
        team_of=lambda _key: "ops",
        now=lambda: HOUR + 17 * 60 + 5.0,
    )
    recorder.add(timeline(**{"tenant": "ana", "owner": "key-1", **job}))
    ((key, counts),) = writer.journal.seal().rows
    assert (key.team, counts.prompt_tokens, counts.generated_tokens) == ("ops", 3, 5)
    return key, counts


def test_job_is_counted_in_its_minute_with_its_whole_price():
    key, counts = recorded()
    assert (key.hour, key.minute, key.batch, key.user) == (HOUR, 17, False, "ana")
    assert (counts.budget_tokens, counts.cost_nano) == (8, 8000)


def test_line_of_a_batch_is_its_users_with_the_discounts():
    key, counts = recorded(tenant="batch:ana", when_idle=True)
    assert (key.batch, key.user) == (True, "ana")
    assert (counts.budget_tokens, counts.cost_nano) == (6, 4000)


@pytest.mark.parametrize("when_idle", [True, False])
def test_only_a_line_that_was_stopped_costs_nothing(when_idle):
    key, counts = recorded(outcome=Displaced.code, when_idle=when_idle)
    assert key.outcome == "displaced"
    assert (counts.budget_tokens, counts.cost_nano) == ((0, 0) if when_idle else (8, 8000))


def test_user_whose_name_begins_as_a_batchs_tenant_keeps_it():
    assert recorded(tenant="batch:ana")[0].user == "batch:ana"
