"""What a key may use: the window by itself, on its own clock, and then what HTTP says of it."""

from collections import deque

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fairlead import errors
from fairlead.api.limits import WINDOW_S, Quota, Window
from fairlead.config import ApiKey, KeyLimits
from fairlead.errors import FairleadError, InvalidRequest, RateLimited
from fairlead.job import Delta

CHAT = "/v1/chat/completions"
BEARER = {"Authorization": "Bearer sk-ana"}


# The window ----------------------------------------------------------------------------------------


def test_a_window_is_full_at_its_limit_and_empty_a_minute_later():
    window = Window(60)
    for _ in range(60):
        assert 0.0 == window.wait_s(1, 100.0)
        window.spend(1, 100.0)
    assert (0, 60.0) == (window.remaining(100.0), window.wait_s(1, 100.0))
    assert (0, 0.5) == (window.remaining(159.5), window.wait_s(1, 159.5))
    assert (60, 0.0, 0.0) == (window.remaining(160.0), window.wait_s(1, 160.0), window.reset_s(160.0))


def test_the_wait_is_for_as_many_expenses_as_are_needed():
    window = Window(10)
    for now_s, amount in ((0.0, 3), (10.0, 3), (20.0, 3)):
        window.spend(amount, now_s)
    waits_s = [window.wait_s(amount, 20.0) for amount in (1, 2, 4, 5, 7, 8, 10)]
    assert [0.0, 40.0, 40.0, 50.0, 50.0, 60.0, 60.0] == waits_s
    assert 60.0 == window.reset_s(20.0)


def test_a_refund_is_as_if_nothing_had_been_spent():
    window = Window(10)
    window.spend(4, 0.0)
    receipt = window.spend(6, 30.0)
    assert 30.0 == window.wait_s(1, 30.0)
    window.refund(receipt, 6)
    assert (6, 0.0, 30.0) == (window.remaining(30.0), window.wait_s(6, 30.0), window.reset_s(30.0))


def test_a_refund_of_what_has_left_the_window_gives_nothing():
    window = Window(10)
    receipt = window.spend(10, 0.0)
    window.spend(4, 60.0)
    window.refund(receipt, 10)
    assert 6 == window.remaining(60.0)


def test_a_debt_is_paid_by_waiting():
    window = Window(10)
    window.spend(25, 0.0)
    window.spend(8, 5.0)
    assert (0, 60.0) == (window.remaining(5.0), window.wait_s(3, 5.0))
    assert (2, 0.0) == (window.remaining(60.0), window.wait_s(2, 60.0))


def test_what_was_spent_within_a_second_comes_back_with_the_last_of_it():
    window = Window(10)
    for now_s in (0.0, 0.5, 0.75):
        window.spend(3, now_s)
    assert (1, 1, 10) == tuple(window.remaining(now_s) for now_s in (60.0, 60.5, 60.75))


def test_a_window_never_holds_more_than_an_expense_a_second():
    window = Window(10**9)
    for tick in range(20_000):
        window.spend(1, tick / 100)
    assert len(window._expenses) <= WINDOW_S + 2
    assert 6000 <= 10**9 - window.remaining(199.99) <= 6100


@given(
    limit=st.integers(1, 50),
    steps=st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 50), st.booleans()), min_size=1, max_size=60
    ),
)
def test_no_minute_has_more_than_the_limit_and_every_wait_is_long_enough(limit, steps):
    """Against every expense ever admitted, each kept by itself. Times are multiples of 1/64 s: exact."""
    window, kept, now_s = Window(limit), deque(), 0.0
    for step, wanted, refunded in steps:
        now_s += step / 64
        amount = min(wanted, limit)
        spent = sum(was for at_s, was in kept if now_s - at_s < WINDOW_S)
        wait_s = window.wait_s(amount, now_s)
        assert limit - window.remaining(now_s) >= spent
        assert 0.0 <= wait_s <= WINDOW_S
        if wait_s > 0:
            now_s += wait_s
            assert 0.0 == window.wait_s(amount, now_s)
        receipt = window.spend(amount, now_s)
        if refunded:
            window.refund(receipt, amount)
        else:
            kept.append((now_s, amount))
        assert sum(was for at_s, was in kept if now_s - at_s < WINDOW_S) <= limit


# A quota -------------------------------------------------------------------------------------------


def test_a_quota_without_limits_admits_everything_and_says_nothing():
    quota = Quota(KeyLimits())
    for _ in range(1000):
        quota.admit(prompt_tokens=10**9, now_s=0.0).answered(10**9, 0.0)
    assert {} == quota.headers(0.0)


def test_a_refused_job_is_charged_nothing():
    quota = Quota(KeyLimits(requests_per_minute=5, tokens_per_minute=100, concurrent=1))
    charge = quota.admit(prompt_tokens=60, now_s=0.0)
    with pytest.raises(RateLimited, match="1 jobs at a time"):
        quota.admit(prompt_tokens=1, now_s=0.0)
    charge.end()
    with pytest.raises(RateLimited, match="100 tokens a minute; try again in 60 s"):
        quota.admit(prompt_tokens=41, now_s=0.0)
    headers = quota.headers(0.0)
    assert ("4", "40") == (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"])
    quota.admit(prompt_tokens=40, now_s=0.0)


def test_the_longer_of_two_waits_is_told():
    quota = Quota(KeyLimits(requests_per_minute=2, tokens_per_minute=100))
    quota.admit(prompt_tokens=10, now_s=0.0)
    quota.admit(prompt_tokens=80, now_s=12.5)
    with pytest.raises(RateLimited) as few_tokens:
        quota.admit(prompt_tokens=50, now_s=12.5)
    with pytest.raises(RateLimited) as few_requests:
        quota.admit(prompt_tokens=5, now_s=12.5)
    assert (60, 48) == (few_tokens.value.retry_after_s, few_requests.value.retry_after_s)
    assert "tokens" in few_tokens.value.message
    assert "requests" in few_requests.value.message


def test_a_prompt_that_no_minute_has_the_tokens_for_is_not_told_to_come_back():
    quota = Quota(KeyLimits(tokens_per_minute=100))
    with pytest.raises(InvalidRequest, match="101 tokens"):
        quota.admit(prompt_tokens=101, now_s=0.0)
    quota.admit(prompt_tokens=100, now_s=0.0)


def test_an_answer_is_charged_once_however_often_it_is_counted():
    quota = Quota(KeyLimits(tokens_per_minute=100))
    charge = quota.admit(prompt_tokens=10, now_s=0.0)
    for tokens in (3, 20, 20):
        charge.answered(tokens, 1.0)
    assert "70" == quota.headers(1.0)["x-ratelimit-remaining-tokens"]


def test_an_estimate_is_replaced_by_what_was_counted():
    quota = Quota(KeyLimits(tokens_per_minute=100))
    other = quota.admit(prompt_tokens=10, now_s=0.0)
    charge = quota.admit(prompt_tokens=50, is_estimate=True, now_s=0.0)
    charge.settle(20, 0.5)
    assert "70" == quota.headers(0.5)["x-ratelimit-remaining-tokens"]
    charge.settle(80, 2.0)
    assert "10" == quota.headers(2.0)["x-ratelimit-remaining-tokens"]
    charge.refund()
    assert "90" == quota.headers(2.0)["x-ratelimit-remaining-tokens"]
    other.refund()
    assert "100" == quota.headers(2.0)["x-ratelimit-remaining-tokens"]


def test_a_check_charges_nothing_and_refuses_what_could_not_be_admitted():
    quota = Quota(KeyLimits(requests_per_minute=1, concurrent=1))
    quota.check(now_s=0.0)
    charge = quota.admit(prompt_tokens=10, now_s=0.0)
    for end in (lambda: None, charge.end):
        end()
        with pytest.raises(RateLimited):
            quota.check(now_s=1.0)
    quota.check(now_s=60.0)


# Over HTTP -----------------------------------------------------------------------------------------


def limited(client_with, **limits):
    return client_with(ApiKey("sk-ana", user="ana", limits=KeyLimits(**limits)), ApiKey("sk-bob"))


def remaining(reply, unit):
    return int(reply.headers[f"x-ratelimit-remaining-{unit}"])


async def test_a_limit_of_requests_is_kept_and_opens_again_when_it_said(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=2)
    assert [200, 200] == [(await client.post(CHAT, chat(), headers=BEARER)).status for _ in range(2)]
    await trio.sleep(20.5)
    refused = await client.post(CHAT, chat(), headers=BEARER)
    assert (429, "rate_limited") == (refused.status, refused.error["code"])
    assert ("40", "40") == (refused.headers["retry-after"], refused.headers["x-estimated-wait"])
    assert "rate_limit_error" == refused.error["type"]
    assert 2 == len(client.gateway.jobs)
    await trio.sleep(39.25)
    assert 429 == (await client.post(CHAT, chat(), headers=BEARER)).status
    await trio.sleep(0.75)
    assert 200 == (await client.post(CHAT, chat(), headers=BEARER)).status


async def test_one_keys_limit_is_not_anothers(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=1)
    for _ in range(3):
        reply = await client.post(CHAT, chat(), headers={"Authorization": "Bearer sk-bob"})
        assert 200 == reply.status
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]
    assert 200 == (await client.post(CHAT, chat(), headers=BEARER)).status
    assert 429 == (await client.post(CHAT, chat(), headers=BEARER)).status


async def test_every_answer_of_a_limited_key_says_what_is_left(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000)
    await client.post(CHAT, chat(), headers=BEARER)
    prompt_tokens = client.gateway.job.prompt_tokens
    await trio.sleep(10)
    expected = {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "50s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": str(1000 - prompt_tokens - 4),
        "x-ratelimit-reset-tokens": "50s",
    }
    for reply in (
        await client.get("/v1/models", headers=BEARER),
        await client.get("/nowhere", headers=BEARER),
        await client.get(CHAT, headers=BEARER),
        await client.post(CHAT, b"{", headers=BEARER),
    ):
        told = {name: value for name, value in reply.headers.items() if name.startswith("x-ratelimit")}
        assert expected == told


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_charged(client_with, chat, stream, autojump_clock):
    client = limited(client_with, tokens_per_minute=1000)
    first = await client.post(CHAT, chat(stream=stream, n=2), headers=BEARER)
    prompt_tokens = client.gateway.job.prompt_tokens
    told = 0 if stream else 8  # a stream's headers leave before its tokens
    assert 1000 - prompt_tokens - told == remaining(first, "tokens")
    second = await client.get("/v1/models", headers=BEARER)
    assert 1000 - prompt_tokens - 8 == remaining(second, "tokens")


async def test_tokens_over_the_limit_hold_up_the_next_request(client_with, chat, autojump_clock):
    client = limited(client_with, tokens_per_minute=100)
    client.gateway.script = lambda job: [[Delta(0, "long", list(range(500)), finish_reason="length")]]
    assert 200 == (await client.post(CHAT, chat(max_tokens=500), headers=BEARER)).status
    refused = await client.post(CHAT, chat(), headers=BEARER)
    assert (429, "60", 0) == (refused.status, refused.headers["retry-after"], remaining(refused, "tokens"))
    await trio.sleep(60)
    assert 200 == (await client.post(CHAT, chat(), headers=BEARER)).status


async def test_a_prompt_larger_than_the_limit_is_a_400(client_with, chat):
    reply = await limited(client_with, tokens_per_minute=3).post(CHAT, chat(), headers=BEARER)
    assert (400, "prompt") == (reply.status, reply.error["param"])


REFUSALS = [
    errors.QueueFull,
    errors.Displaced,
    errors.NoQueue,
    errors.QueueTimeout,
    errors.InvalidRequest,
    errors.ModelLoading,
    errors.NoNode,
    errors.Draining,
    errors.LoadFailed,
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
async def test_a_refused_request_costs_nothing(client_with, chat, kind, stream, autojump_clock):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000, concurrent=1)
    client.gateway.refusal = kind("no")
    for _ in range(3):
        reply = await client.post(CHAT, chat(stream=stream), headers=BEARER)
        assert kind.status == reply.status
        assert (5, 1000) == (remaining(reply, "requests"), remaining(reply, "tokens"))
        assert "0s" == reply.headers["x-ratelimit-reset-requests"]


async def test_a_stream_refused_after_its_early_200_costs_nothing_either(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000)
    client.gateway.wait_s = 40.0
    client.gateway.refusal = errors.QueueTimeout("waited too long")
    assert 200 == (await client.post(CHAT, chat(stream=True), headers=BEARER)).status
    reply = await client.get("/v1/models", headers=BEARER)
    assert (5, 1000) == (remaining(reply, "requests"), remaining(reply, "tokens"))


@pytest.mark.parametrize("kind", [errors.RequestTimeout, errors.Cancelled])
async def test_what_ran_or_was_cancelled_is_charged(client_with, chat, kind, autojump_clock):
    client = limited(client_with, requests_per_minute=5)
    client.gateway.refusal = kind("over")
    assert 4 == remaining(await client.post(CHAT, chat(), headers=BEARER), "requests")


async def test_what_the_model_refuses_to_read_is_not_charged(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=5)
    for body in (chat(temperature=9), chat(model="huge"), chat(min_tokens=10**6), chat(priority="none")):
        assert 5 == remaining(await client.post(CHAT, body, headers=BEARER), "requests")


async def test_jobs_at_a_time_are_counted_until_they_end_or_their_client_leaves(
    client_with, chat, autojump_clock
):
    client = limited(client_with, concurrent=2)
    client.gateway.script = lambda job: [[Delta(0, "a", [1])], None]
    left = trio.Event()

    async def ask():
        await client.post(CHAT, chat(stream=True), headers=BEARER, left=left)

    async with trio.open_nursery() as clients:
        clients.start_soon(ask)
        clients.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        refused = await client.post(CHAT, chat(), headers=BEARER)
        assert (429, "rate_limited") == (refused.status, refused.error["code"])
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        left.set()
    client.gateway.script = lambda job: [[Delta(0, "a", [1], finish_reason="stop")]]
    assert 200 == (await client.post(CHAT, chat(), headers=BEARER)).status


async def test_a_client_that_leaves_is_charged_for_what_was_generated_for_it(
    client_with, chat, autojump_clock
):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000)
    client.gateway.script = lambda job: [[Delta(0, "a", [1, 2, 3])], None]
    left = trio.Event()
    async with trio.open_nursery() as clients:
        clients.start_soon(lambda: client.post(CHAT, chat(stream=True), headers=BEARER, left=left))
        await trio.testing.wait_all_tasks_blocked()
        left.set()
    reply = await client.get("/v1/models", headers=BEARER)
    assert (4, 997 - client.gateway.job.prompt_tokens) == (
        remaining(reply, "requests"),
        remaining(reply, "tokens"),
    )


def test_the_errors_of_limits_are_refusals_a_client_may_repeat():
    kinds: list[type[FairleadError]] = [errors.Displaced, errors.NoQueue, errors.RateLimited]
    assert [(429, None)] * 3 == [(kind.status, kind.should_retry) for kind in kinds]
