"""The estimated cost of a job, and how much of a node's cache it is expected to hold."""

import pytest

from fairlead.config import QueueConfig
from fairlead.dispatch.forecast import Forecaster
from fairlead.job import TEXTS_AT_ONCE, Job, Sampling


def job(lengths, **options):
    prompts = tuple(list(range(length)) for length in lengths)
    return Job("id", "A", "m", prompts, Sampling(max_tokens=1), **options)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([7], 7),
        ([3, 5, 9], 17),
        ([10] * 2000, 10 * TEXTS_AT_ONCE),
        ([1] * 100 + [50] * 2, TEXTS_AT_ONCE - 2 + 100),
    ],
)
def test_of_many_texts_to_embed_only_the_longest_that_may_run_at_once_are_counted(lengths, tokens):
    ticket = Forecaster(QueueConfig()).ticket(job(lengths, embed=True))
    assert tokens == ticket.tokens
    assert sum(lengths) == ticket.cost  # every token is computed, and none generated


def test_of_prompts_that_are_continued_each_is_counted_for_all_its_answers():
    ticket = Forecaster(QueueConfig()).ticket(job([3, 5], n=2))
    assert ticket.tokens == 2 * 8 + 4
