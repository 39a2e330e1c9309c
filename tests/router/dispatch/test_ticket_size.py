"""The estimated cost of a job, and how much of a node's cache it is expected to hold."""

from random import Random

import pytest

from fairlead.base.config import QueueConfig
from fairlead.base.job import TEXTS_AT_ONCE, Job, Sampling
from fairlead.generation.gateway import spec_of
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.dispatch.wait_estimator import WaitEstimator
from router.dispatch.recorded import scheduler


def ticket_of(job: JobSpec) -> Ticket:
    return WaitEstimator(scheduler()[0], QueueConfig(), Random(0)).new_ticket(job)


def job(lengths, **options):
    prompts = tuple(list(range(length)) for length in lengths)
    return spec_of(Job("id", "A", "m", prompts, Sampling(max_tokens=1), **options))


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
    ticket = ticket_of(job(lengths, embed=True))
    assert tokens == ticket.tokens
    assert sum(lengths) == ticket.cost  # every token is computed, and none generated


def test_of_prompts_that_are_continued_each_is_counted_for_all_its_answers():
    ticket = ticket_of(job([3, 5], n=2))
    assert ticket.tokens == 2 * 8 + 4
