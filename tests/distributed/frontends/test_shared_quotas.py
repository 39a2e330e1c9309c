"""Keys with limits, used through several fronts: the limits are those of one process."""

import pytest
import trio

from distributed.frontends.system import System, settle
from fairlead.base.config import ApiKey, KeyLimits
from fairlead.base.errors import InvalidRequest, NoNode, RateLimited
from fairlead.distributed.frontends.questions import FrontQuestions
from fairlead.distributed.frontends.shared_quotas import RemoteQuotas

LIMITED = ApiKey(key="sk-ana", limits=KeyLimits(requests_per_minute=3, tokens_per_minute=100, concurrent=2))
TWO_AT_A_TIME = ApiKey(key="sk-bo", limits=KeyLimits(concurrent=2))


@pytest.fixture
async def system(nursery):
    system = System(nursery)
    system.start_dispatcher()
    return system


def front(system, number, *, timeout_s=60.0):
    started = system.start_front(number)
    return started, RemoteQuotas(started, timeout_s=timeout_s)


async def two_fronts(system):
    (_, one), (_, two) = front(system, 1), front(system, 2)
    await settle()
    return one, two


async def test_requests_of_all_fronts_count_together(autojump_clock, system):
    one, two = await two_fronts(system)
    for quotas in (one, two, one):
        (await quotas.admit(LIMITED, prompt_tokens=10)).end()
    with pytest.raises(RateLimited, match="3 requests a minute") as caught:
        await two.admit(LIMITED, prompt_tokens=10)
    assert caught.value.retry_after_s == 60
    await trio.sleep(61)
    (await two.admit(LIMITED, prompt_tokens=10)).end()


async def test_jobs_at_a_time_count_together_and_end_with_their_front(autojump_clock, system):
    one, two = await two_fronts(system)
    first = await one.admit(TWO_AT_A_TIME, prompt_tokens=1)
    await one.admit(TWO_AT_A_TIME, prompt_tokens=1)
    with pytest.raises(RateLimited, match="2 jobs at a time"):
        await two.admit(TWO_AT_A_TIME, prompt_tokens=1)
    first.end()
    await settle()
    await two.admit(TWO_AT_A_TIME, prompt_tokens=1)
    with pytest.raises(RateLimited):
        await two.check(TWO_AT_A_TIME)
    system.kill_front(1)
    await trio.sleep(11)  # it does not connect again
    await two.check(TWO_AT_A_TIME)
    assert list(system.quotas._charges) == ["front 2"]


async def test_tokens_of_answers_count_and_refused_jobs_do_not(autojump_clock, system):
    one, two = await two_fronts(system)
    charge = await one.admit(LIMITED, prompt_tokens=10)
    charge.charge_answer(85, 0.0)
    charge.end()
    refused = await two.admit(LIMITED, prompt_tokens=5)
    refused.refund()
    refused.end()
    await settle()
    with pytest.raises(RateLimited, match="100 tokens a minute"):
        await two.admit(LIMITED, prompt_tokens=6)
    corrected = await two.admit(LIMITED, prompt_tokens=5, is_estimate=True)
    corrected.correct_prompt(1, 0.0)
    corrected.end()
    await settle()
    (await one.admit(LIMITED, prompt_tokens=4)).end()


async def test_prompt_above_the_limit_is_refused_with_its_field(autojump_clock, system):
    one, _ = await two_fronts(system)
    with pytest.raises(InvalidRequest) as caught:
        await one.admit(LIMITED, prompt_tokens=101, param="messages")
    assert caught.value.param == "messages"


async def test_headers_have_the_usage_of_all_fronts(autojump_clock, system):
    one, two = await two_fronts(system)
    assert two.headers(None) == two.headers(ApiKey(key="sk-free")) == {}
    assert two.headers(LIMITED)["x-ratelimit-remaining-tokens"] == "100"
    charge = await one.admit(LIMITED, prompt_tokens=10)
    charge.charge_answer(20, 0.0)
    charge.end()
    await settle()
    expected = {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "60s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "60s",
    }
    assert one.headers(LIMITED) == expected
    two.update(system.quotas.usage())
    assert two.headers(LIMITED) == expected
    await trio.sleep(60)
    assert two.headers(LIMITED)["x-ratelimit-remaining-tokens"] == "100"
    assert system.quotas.usage() == {}


async def test_new_dispatcher_has_the_jobs_that_run_and_the_tokens_of_those_that_ended(
    autojump_clock, system
):
    one, two = await two_fronts(system)
    await one.admit(TWO_AT_A_TIME, prompt_tokens=1)
    ended = await one.admit(LIMITED, prompt_tokens=10)
    system.kill_dispatcher()
    await settle()
    ended.charge_answer(50, 0.0)
    ended.end()
    system.start_dispatcher(expected=("front 1", "front 2"))
    await trio.sleep(2)
    await two.admit(TWO_AT_A_TIME, prompt_tokens=1)
    with pytest.raises(RateLimited):
        await two.admit(TWO_AT_A_TIME, prompt_tokens=1)
    with pytest.raises(RateLimited):
        await two.admit(LIMITED, prompt_tokens=41)
    await two.admit(LIMITED, prompt_tokens=40)


async def test_admission_waits_for_a_dispatcher_up_to_the_timeout(autojump_clock, system):
    started, quotas = front(system, 1, timeout_s=5.0)
    await settle()
    system.kill_dispatcher()
    await settle()
    began = trio.current_time()
    with pytest.raises(NoNode):
        await quotas.admit(LIMITED, prompt_tokens=1)
    assert 4.0 <= trio.current_time() - began <= 5.5
    (await quotas.admit(None, prompt_tokens=1)).end()  # has no limits
    async with trio.open_nursery() as waiting:
        waiting.start_soon(quotas.check, LIMITED)
        await trio.sleep(1)
        system.start_dispatcher(expected=("front 1",))
    assert started.is_connected


async def test_job_that_is_cancelled_while_it_asks_is_not_charged(autojump_clock, system):
    one, two = await two_fronts(system)
    with trio.CancelScope() as scope:
        scope.cancel()
        await one.admit(TWO_AT_A_TIME, prompt_tokens=1)
    assert scope.cancelled_caught
    await settle()
    await two.admit(TWO_AT_A_TIME, prompt_tokens=1)
    await two.admit(TWO_AT_A_TIME, prompt_tokens=1)


async def test_question_that_is_asked_twice_is_charged_once(autojump_clock, system):
    one, two = await two_fronts(system)
    real, asked = one._client.ask, []

    async def lost(question, *arguments, **options):
        answer = await real(question, *arguments, **options)
        asked.append(question)
        if len(asked) == 1:
            raise NoNode("the answer was lost")
        return answer

    one._client.ask = lost
    await one.admit(TWO_AT_A_TIME, prompt_tokens=1)
    assert asked == ["admit", "admit"]
    await two.admit(TWO_AT_A_TIME, prompt_tokens=1)
    with pytest.raises(RateLimited):
        await two.admit(TWO_AT_A_TIME, prompt_tokens=1)


async def test_question_that_is_asked_again_over_a_new_connection_is_charged_once(autojump_clock, system):
    started, quotas = front(system, 1)
    await settle()
    answer, real = trio.Event(), system.quotas.admit

    def admit_and_cut(*arguments):
        usage = real(*arguments)
        if not answer.is_set():
            answer.set()
            system.cut(started)
        return usage

    system.server._questions = FrontQuestions(system.quotas.questions | {"admit": admit_and_cut}, {})
    await quotas.admit(LIMITED, prompt_tokens=10)
    (usage,) = system.quotas.usage().values()
    assert (usage.requests, usage.tokens) == (1, 10)
