"""Jobs for a model that no server has."""

import pytest

from fairlead.base.config import QueueConfig
from fairlead.base.errors import QueueFull, QueueTimeout
from fairlead.router.dispatch.dispatcher import Dispatcher
from router.dispatch.recorded import job


async def test_no_wait_is_estimated_while_no_server_has_the_model(autojump_clock, nursery):
    dispatcher = Dispatcher(QueueConfig(timeout_s=5))
    nursery.start_soon(dispatcher.run)
    with pytest.raises(QueueTimeout, match="no server of the model m is up"):
        async with dispatcher.seat(job().job):
            pass
    estimate = await dispatcher.estimate("m", "A", 1, "")
    assert (estimate["position"], estimate["estimated_wait_s"]) == (1, None)


async def test_retry_time_is_short_for_an_estimate_of_nothing_and_longer_without_an_estimate(autojump_clock):
    estimator = Dispatcher(QueueConfig()).estimator
    assert estimator.add_retry_time(QueueFull("full", estimated_wait_s=0), "m").retry_after_s == 1
    assert estimator.add_retry_time(QueueFull("full"), "m").retry_after_s >= 10
