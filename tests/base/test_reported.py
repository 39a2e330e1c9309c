"""Numbers and text that a node reports are used if they are plausible; otherwise the server counts itself."""

import msgspec
import pytest

from fairlead.base.job import Sampling
from fairlead.base.reported import EXCERPT_LENGTH, UNSEEN_TOKENS, excerpt, seconds
from nodes.listening import generated, relayed_job
from nodes.scripted import full_response, node, scripted, stream

# Used in the responses below.
ALLOWED = 10
CHOICES = b'[{"message": {"content": "hi hi hi"}}]'
ESTIMATE = len(CHOICES) // 4

IMPLAUSIBLE = [
    None,
    b"1" + b"0" * 30,
    b"9" * 15,
    b"-5",
    b"1.5",
    b'"7"',
    b"null",
    b"true",
    b'{"of": 7}',
    b"[7]",
]


def job(*, stream: bool, max_tokens: int = ALLOWED, n: int = 1):
    relayed = relayed_job(stream=stream, n=n)
    return msgspec.structs.replace(relayed, sampling=Sampling(max_tokens=max_tokens))


def usage(reported: bytes | None) -> bytes:
    """Return a `usage` member for a whole response or a chunk."""
    return b"" if reported is None else b', "usage": {"completion_tokens": %s}' % reported


async def tokens_of(answer: bytes, relayed) -> int:
    """Return the tokens that a job is charged for."""
    with scripted(lambda _request: [answer]):
        result = await generated(node(), relayed)
    assert result.error is None
    return result.tokens


@pytest.mark.parametrize(
    ("reported", "tokens"),
    [
        (b"0", 0),
        (b"3", 3),
        (b"%d" % ALLOWED, ALLOWED),
        (b"%d" % len(CHOICES), len(CHOICES)),
        (b"%d" % (len(CHOICES) + 1), ESTIMATE),
        *((implausible, ESTIMATE) for implausible in IMPLAUSIBLE),
    ],
)
async def test_plausible_token_count_of_a_whole_response_is_used(reported, tokens):
    answer = full_response(b'{"choices": %s%s}' % (CHOICES, usage(reported)))
    assert await tokens_of(answer, job(stream=False)) == tokens


async def test_estimate_is_at_most_what_the_client_allowed():
    answer = full_response(b'{"choices": [{"text": "%s"}]}' % (b"x" * 1000))
    assert await tokens_of(answer, job(stream=False)) == ALLOWED
    assert await tokens_of(answer, job(stream=False, n=3)) == 3 * ALLOWED


@pytest.mark.parametrize("reported", [b"0", b"7", *IMPLAUSIBLE])
async def test_no_tokens_are_counted_where_nothing_is_generated(reported):
    answer = full_response(b'{"data": [{"embedding": [1, 2]}]%s}' % usage(reported))
    assert await tokens_of(answer, job(stream=False, max_tokens=1)) == 0


async def test_reported_prompt_tokens_are_ignored():
    answer = full_response(b'{"choices": [], "usage": {"prompt_tokens": 1000000000, "completion_tokens": 2}}')
    relayed = job(stream=False)
    assert await tokens_of(answer, relayed) == 2
    assert relayed.prompt_tokens == 0


def text_event(text: bytes, reported: bytes | None = None) -> bytes:
    choice = b'{"index": 0, "delta": {"content": "%s"}, "finish_reason": null}' % text
    return b'data: {"choices": [%s]%s}\n\n' % (choice, usage(reported))


def end(reported: bytes | None = None) -> bytes:
    finish = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]%s}\n\n'
    return finish % usage(reported) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("reported", "tokens"),
    [
        (b"1", 1),
        (b"2", 2),
        (b"%d" % ALLOWED, ALLOWED),
        (b"%d" % (ALLOWED + 1), 3),
        (b"0", 3),
        *((implausible, 3) for implausible in IMPLAUSIBLE),
    ],
)
async def test_plausible_token_count_of_a_stream_is_used(reported, tokens):
    answer = stream(*[text_event(b"hi")] * 3, end(reported))
    assert await tokens_of(answer, job(stream=True)) == tokens


async def test_text_may_have_a_token_for_each_of_its_bytes():
    text = "é" * 50
    for reported, tokens in ((100, 100), (101, 2)):
        answer = stream(text_event(b"", b"1"), *[text_event(text[:25].encode())] * 2, end(b"%d" % reported))
        assert await tokens_of(answer, job(stream=True)) == tokens


async def test_last_of_several_reports_is_used():
    answer = stream(
        text_event(b"hi", b"1" + b"0" * 30), text_event(b"hi", b"-4"), text_event(b"hi", b"9"), end(b"4")
    )
    assert await tokens_of(answer, job(stream=True)) == 4
    answer = stream(
        text_event(b"hi", b"1"), text_event(b"hi", b"2"), text_event(b"hi", b"3"), end(b"1" + b"0" * 14)
    )
    assert await tokens_of(answer, job(stream=True)) == 3


async def test_hidden_reasoning_is_counted_up_to_what_the_client_allowed():
    answer = stream(text_event(b"42"), end(b"50000"))
    assert await tokens_of(answer, job(stream=True, max_tokens=60_000)) == 50_000
    answer = stream(text_event(b"42"), end(b"%d" % (UNSEEN_TOKENS + 1)))
    assert await tokens_of(answer, job(stream=True, max_tokens=2**31 - 1)) == 1


@pytest.mark.parametrize("index", [b"-5", b"7", b"1" + b"0" * 40])
async def test_invalid_choice_index_is_mapped_to_an_existing_choice(index):
    piece = b'data: {"choices": [{"index": %s, "delta": {"content": "hi"}}]}\n\n' % index
    with scripted(lambda _request: [stream(piece, end())]):
        result = await generated(node(), job(stream=True, n=2))
    assert result.error is None
    assert {delta.index for delta in result.deltas} <= {0, 1, 2}
    assert result.text(0) + result.text(1) == "hi"


# Text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("7", 7),
        (" 7 ", 7),
        ("0", 1),
        ("61", 60),
        ("9" * 15, 60),
        ("1" + "0" * 30, None),
        ("-5", None),
        ("1.5", None),
        ("NaN", None),
        ("", None),
        ("٧", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_used_within_bounds(header, wait_s):
    assert seconds(header, 60) == wait_s


@pytest.mark.parametrize(
    "quoted_text", ["<b>\n\x1b[31m\u202e" + "x" * 10_000, b"\xff\x00<b>\r\n" + b"x" * 10_000]
)
def test_excerpt_is_one_short_printable_line(quoted_text):
    quoted = excerpt(quoted_text)
    assert quoted.isprintable()
    assert len(quoted) <= EXCERPT_LENGTH
    assert "<b>" in quoted
