"""The estimated cost of a job, and how much of a node's cache it is expected to hold."""

from random import Random

import pytest

from fairlead.base.config import QueueConfig
from fairlead.base.job import PORTION_TEXTS, PORTION_TOKENS, Job, Sampling, portions_of
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
    ("lengths", "sizes"),
    [
        ([7], [1]),
        ([3, 5, 9], [3]),
        ([10] * 100, [PORTION_TEXTS] * 3 + [4]),
        ([200] * 5, [2, 2, 1]),
        ([PORTION_TOKENS - 1, 1, 1], [2, 1]),
        ([1, 3 * PORTION_TOKENS, 1], [1, 1, 1]),
    ],
)
def test_texts_to_embed_are_divided_into_portions_of_about_one_step(lengths, sizes):
    embedding = job(lengths, embed=True)
    portions = portions_of([[0] * length for length in lengths])
    assert sizes == [len(portion) for portion in portions]
    assert [index for portion in portions for index in portion] == list(range(len(lengths)))
    assert (embedding.turns, embedding.seats) == (len(sizes), 1)
    ticket = ticket_of(embedding)
    assert sum(lengths) == ticket.cost == ticket.tokens  # every token is computed, and none generated


def test_of_prompts_that_are_continued_each_is_counted_for_all_its_answers():
    ticket = ticket_of(job([3, 5], n=2))
    assert ticket.tokens == 2 * 8 + 4
