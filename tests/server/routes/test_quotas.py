"""Limits of an API key: the window and the quota, which are given the time, and then both over HTTP."""

from collections import deque

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base import errors
from fairlead.base.config import ApiKey, KeyLimits
from fairlead.base.errors import FairleadError, InvalidRequest, RateLimited
from fairlead.base.job import Delta
from fairlead.router.quotas.quotas import WINDOW_S, Quota, QuotaWindow

CHAT = "/v1/chat/completions"
BEARER = {"Authorization": "Bearer sk-ana"}


# The window ----------------------------------------------------------------------------------------


def test_window_is_full_at_its_limit_and_empty_a_minute_later():
    window = QuotaWindow(60)
    for _ in range(60):
        assert window.wait_s(1, 100.0) == 0.0
        window.spend(1, 100.0)
    assert (window.remaining(100.0), window.wait_s(1, 100.0)) == (0, 60.0)
    assert (window.remaining(159.5), window.wait_s(1, 159.5)) == (0, 0.5)
    assert (window.remaining(160.0), window.wait_s(1, 160.0), window.reset_s(160.0)) == (60, 0.0, 0.0)


def test_wait_lasts_until_enough_buckets_have_left_the_window():
    window = QuotaWindow(10)
    for now_s, amount in ((0.0, 3), (10.0, 3), (20.0, 3)):
        window.spend(amount, now_s)
    waits_s = [window.wait_s(amount, 20.0) for amount in (1, 2, 4, 5, 7, 8, 10)]
    assert waits_s == [0.0, 40.0, 40.0, 50.0, 50.0, 60.0, 60.0]
    assert window.reset_s(20.0) == 60.0


def test_refund_undoes_its_expense():
    window = QuotaWindow(10)
    window.spend(4, 0.0)
    receipt = window.spend(6, 30.0)
    assert window.wait_s(1, 30.0) == 30.0
    window.refund(receipt, 6)
    assert (window.remaining(30.0), window.wait_s(6, 30.0), window.reset_s(30.0)) == (6, 0.0, 30.0)


def test_refund_of_what_has_left_the_window_changes_nothing():
    window = QuotaWindow(10)
    receipt = window.spend(10, 0.0)
    window.spend(4, 60.0)
    window.refund(receipt, 10)
    assert window.remaining(60.0) == 6


def test_spending_above_the_limit_delays_later_buckets():
    window = QuotaWindow(10)
    window.spend(25, 0.0)
    window.spend(8, 5.0)
    assert (window.remaining(5.0), window.wait_s(3, 5.0)) == (0, 60.0)
    assert (window.remaining(60.0), window.wait_s(2, 60.0)) == (2, 0.0)


def test_buckets_within_a_second_leave_the_window_with_the_last_of_them():
    window = QuotaWindow(10)
    for now_s in (0.0, 0.5, 0.75):
        window.spend(3, now_s)
    assert tuple(window.remaining(now_s) for now_s in (60.0, 60.5, 60.75)) == (1, 1, 10)


def test_window_keeps_at_most_one_expense_a_second():
    window = QuotaWindow(10**9)
    for tick in range(20_000):
        window.spend(1, tick / 100)
    assert len(window._buckets) <= WINDOW_S + 2
    assert 6000 <= 10**9 - window.remaining(199.99) <= 6100


@given(
    limit=st.integers(1, 50),
    steps=st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 50), st.booleans()), min_size=1, max_size=60
    ),
)
def test_no_minute_has_more_than_the_limit_and_every_wait_is_long_enough(limit, steps):
    """Compares with a list of all admitted expenses. Times are multiples of 1/64 s, so they are exact."""
    window, kept, now_s = QuotaWindow(limit), deque(), 0.0
    for step, requested, refunded in steps:
        now_s += step / 64
        amount = min(requested, limit)
        spent = sum(was for at_s, was in kept if now_s - at_s < WINDOW_S)
        wait_s = window.wait_s(amount, now_s)
        assert limit - window.remaining(now_s) >= spent
        assert 0.0 <= wait_s <= WINDOW_S
        if wait_s > 0:
            now_s += wait_s
            assert window.wait_s(amount, now_s) == 0.0
        receipt = window.spend(amount, now_s)
        if refunded:
            window.refund(receipt, amount)
        else:
            kept.append((now_s, amount))
        assert sum(was for at_s, was in kept if now_s - at_s < WINDOW_S) <= limit


# A quota -------------------------------------------------------------------------------------------


def test_quota_without_limits_admits_everything_and_has_no_headers():
    quota = Quota(KeyLimits())
    for _ in range(1000):
        quota.admit(prompt_tokens=10**9, now_s=0.0).charge_answer(10**9, 0.0)
    assert quota.headers(0.0) == {}


def test_refused_job_is_charged_nothing():
    quota = Quota(KeyLimits(requests_per_minute=5, tokens_per_minute=100, concurrent=1))
    charge = quota.admit(prompt_tokens=60, now_s=0.0)
    with pytest.raises(RateLimited, match="1 jobs at a time"):
        quota.admit(prompt_tokens=1, now_s=0.0)
    charge.end()
    with pytest.raises(RateLimited, match="100 tokens a minute; try again in 60 s"):
        quota.admit(prompt_tokens=41, now_s=0.0)
    headers = quota.headers(0.0)
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("4", "40")
    quota.admit(prompt_tokens=40, now_s=0.0)


def test_longer_of_two_waits_is_reported():
    quota = Quota(KeyLimits(requests_per_minute=2, tokens_per_minute=100))
    quota.admit(prompt_tokens=10, now_s=0.0)
    quota.admit(prompt_tokens=80, now_s=12.5)
    with pytest.raises(RateLimited) as few_tokens:
        quota.admit(prompt_tokens=50, now_s=12.5)
    with pytest.raises(RateLimited) as few_requests:
        quota.admit(prompt_tokens=5, now_s=12.5)
    assert (few_tokens.value.retry_after_s, few_requests.value.retry_after_s) == (60, 48)
    assert "tokens" in few_tokens.value.message
    assert "requests" in few_requests.value.message


def test_prompt_above_the_token_limit_is_invalid_and_has_no_retry_time():
    quota = Quota(KeyLimits(tokens_per_minute=100))
    with pytest.raises(InvalidRequest, match="101 tokens"):
        quota.admit(prompt_tokens=101, now_s=0.0)
    quota.admit(prompt_tokens=100, now_s=0.0)


def test_answer_is_charged_once_however_often_it_is_counted():
    quota = Quota(KeyLimits(tokens_per_minute=100))
    charge = quota.admit(prompt_tokens=10, now_s=0.0)
    for tokens in (3, 20, 20):
        charge.charge_answer(tokens, 1.0)
    assert quota.headers(1.0)["x-ratelimit-remaining-tokens"] == "70"


def test_estimate_is_replaced_by_the_count():
    quota = Quota(KeyLimits(tokens_per_minute=100))
    other = quota.admit(prompt_tokens=10, now_s=0.0)
    charge = quota.admit(prompt_tokens=50, is_estimate=True, now_s=0.0)
    charge.correct_prompt(20, 0.5)
    assert quota.headers(0.5)["x-ratelimit-remaining-tokens"] == "70"
    charge.correct_prompt(80, 2.0)
    assert quota.headers(2.0)["x-ratelimit-remaining-tokens"] == "10"
    charge.refund()
    assert quota.headers(2.0)["x-ratelimit-remaining-tokens"] == "90"
    other.refund()
    assert quota.headers(2.0)["x-ratelimit-remaining-tokens"] == "100"


def test_check_charges_nothing_and_refuses_what_could_not_be_admitted():
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


async def test_request_limit_holds_until_the_reported_retry_time(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=2)
    assert [(await client.post(CHAT, chat(), headers=BEARER)).status for _ in range(2)] == [200, 200]
    await trio.sleep(20.5)
    refused = await client.post(CHAT, chat(), headers=BEARER)
    assert (refused.status, refused.error["code"]) == (429, "rate_limited")
    assert (refused.headers["retry-after"], refused.headers["x-estimated-wait"]) == ("40", "40")
    assert refused.error["type"] == "rate_limit_error"
    assert len(client.gateway.jobs) == 2
    await trio.sleep(39.25)
    assert (await client.post(CHAT, chat(), headers=BEARER)).status == 429
    await trio.sleep(0.75)
    assert (await client.post(CHAT, chat(), headers=BEARER)).status == 200


async def test_limit_applies_to_its_key_only(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=1)
    for _ in range(3):
        reply = await client.post(CHAT, chat(), headers={"Authorization": "Bearer sk-bob"})
        assert reply.status == 200
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]
    assert (await client.post(CHAT, chat(), headers=BEARER)).status == 200
    assert (await client.post(CHAT, chat(), headers=BEARER)).status == 429


async def test_every_response_for_a_limited_key_reports_what_remains(client_with, chat, autojump_clock):
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
        limits = {name: value for name, value in reply.headers.items() if name.startswith("x-ratelimit")}
        assert expected == limits


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_charged(client_with, chat, stream, autojump_clock):
    client = limited(client_with, tokens_per_minute=1000)
    first = await client.post(CHAT, chat(stream=stream, n=2), headers=BEARER)
    prompt_tokens = client.gateway.job.prompt_tokens
    reported = 0 if stream else 8  # a stream's headers are sent before its tokens
    assert 1000 - prompt_tokens - reported == remaining(first, "tokens")
    second = await client.get("/v1/models", headers=BEARER)
    assert 1000 - prompt_tokens - 8 == remaining(second, "tokens")


async def test_tokens_over_the_limit_delay_the_next_request(client_with, chat, autojump_clock):
    client = limited(client_with, tokens_per_minute=100)
    client.gateway.script = lambda job: [[Delta(0, "long", list(range(500)), finish_reason="length")]]
    assert (await client.post(CHAT, chat(max_tokens=500), headers=BEARER)).status == 200
    refused = await client.post(CHAT, chat(), headers=BEARER)
    assert (refused.status, refused.headers["retry-after"], remaining(refused, "tokens")) == (429, "60", 0)
    await trio.sleep(60)
    assert (await client.post(CHAT, chat(), headers=BEARER)).status == 200


async def test_prompt_larger_than_the_limit_is_a_400(client_with, chat):
    reply = await limited(client_with, tokens_per_minute=3).post(CHAT, chat(), headers=BEARER)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


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
async def test_refused_request_costs_nothing(client_with, chat, kind, stream, autojump_clock):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000, concurrent=1)
    client.gateway.refusal = kind("no")
    for _ in range(3):
        reply = await client.post(CHAT, chat(stream=stream), headers=BEARER)
        assert kind.status == reply.status
        assert (remaining(reply, "requests"), remaining(reply, "tokens")) == (5, 1000)
        assert reply.headers["x-ratelimit-reset-requests"] == "0s"


async def test_stream_refused_after_its_early_200_costs_nothing_either(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000)
    client.gateway.wait_s = 40.0
    client.gateway.refusal = errors.QueueTimeout("waited too long")
    assert (await client.post(CHAT, chat(stream=True), headers=BEARER)).status == 200
    reply = await client.get("/v1/models", headers=BEARER)
    assert (remaining(reply, "requests"), remaining(reply, "tokens")) == (5, 1000)


@pytest.mark.parametrize("kind", [errors.RequestTimeout, errors.Cancelled])
async def test_request_that_ran_or_was_cancelled_is_charged(client_with, chat, kind, autojump_clock):
    client = limited(client_with, requests_per_minute=5)
    client.gateway.refusal = kind("over")
    assert remaining(await client.post(CHAT, chat(), headers=BEARER), "requests") == 4


async def test_invalid_request_is_not_charged(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=5)
    for body in (chat(temperature=9), chat(model="huge"), chat(min_tokens=10**6), chat(priority="none")):
        assert remaining(await client.post(CHAT, body, headers=BEARER), "requests") == 5


async def test_concurrent_jobs_count_until_they_end_or_their_client_disconnects(
    client_with, chat, autojump_clock
):
    client = limited(client_with, concurrent=2)
    client.gateway.script = lambda job: [[Delta(0, "a", [1])], None]
    left = trio.Event()

    async def send_request():
        await client.post(CHAT, chat(stream=True), headers=BEARER, disconnected=left)

    async with trio.open_nursery() as clients:
        clients.start_soon(send_request)
        clients.start_soon(send_request)
        await trio.testing.wait_all_tasks_blocked()
        refused = await client.post(CHAT, chat(), headers=BEARER)
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        left.set()
    client.gateway.script = lambda job: [[Delta(0, "a", [1], finish_reason="stop")]]
    assert (await client.post(CHAT, chat(), headers=BEARER)).status == 200


async def test_client_that_disconnects_is_charged_for_the_generated_tokens(client_with, chat, autojump_clock):
    client = limited(client_with, requests_per_minute=5, tokens_per_minute=1000)
    client.gateway.script = lambda job: [[Delta(0, "a", [1, 2, 3])], None]
    left = trio.Event()
    async with trio.open_nursery() as clients:
        clients.start_soon(lambda: client.post(CHAT, chat(stream=True), headers=BEARER, disconnected=left))
        await trio.testing.wait_all_tasks_blocked()
        left.set()
    reply = await client.get("/v1/models", headers=BEARER)
    assert (
        remaining(reply, "requests"),
        remaining(reply, "tokens"),
    ) == (4, 997 - client.gateway.job.prompt_tokens)


def test_errors_of_limits_are_429s_that_clients_may_retry():
    kinds: list[type[FairleadError]] = [errors.Displaced, errors.NoQueue, errors.RateLimited]
    assert [(kind.status, kind.should_retry) for kind in kinds] == [(429, None)] * 3
