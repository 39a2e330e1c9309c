"""Checks of what other servers report: every number and every text of a node passes through here.

A node may be broken or malicious. A number counts only if it has the right type and is possible; otherwise it
is treated as missing. Text is shortened to one printable line. Independent of HTTP and of API formats.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fairlead.base.errors import printable
from fairlead.base.job import Job

Shape = TypeVar("Shape")

EXCERPT_LENGTH = 200
# The assumed size of a token where tokens were not counted.
BYTES_A_TOKEN = 4
# Tokens of one choice that may be generated without being shown: the reasoning of some models. The largest
# output limits of today's models are as high.
UNSEEN_TOKENS = 128 * 1024

_NULL = msgspec.Raw(b"null")
_COUNT = re.compile(rb"[0-9]{1,15}")
_SECONDS = re.compile(r"[0-9]{1,15}")


def decoded(decode: Callable[[Any], Shape], data: bytes | msgspec.Raw) -> Shape | None:
    """Return the decoded JSON; None if it is malformed, of another shape, or nested too deeply."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_given(member: msgspec.Raw) -> bool:
    """Return whether an optional member is present, and not null."""
    return bool(member) and member != _NULL


def token_count(member: msgspec.Raw) -> int | None:
    """Return a reported number of tokens; None unless it is an integer of at most 15 digits, 0 or more."""
    text = bytes(member) if len(member) < 20 else b""
    return int(text) if _COUNT.fullmatch(text) else None


def allowed_tokens(job: Job) -> int:
    """Return how many tokens the client allows for all choices together, within `UNSEEN_TOKENS` for each."""
    return min(job.sampling.max_tokens, UNSEEN_TOKENS) * job.sequences


def generated_tokens(job: Job, reported: int | None, *, counted: int, text_bytes: int, least: int = 0) -> int:
    """Return how many tokens an answer has: the reported number if it is possible, else our own count.

    job: the job, which bounds the tokens; reasoning may not be shown, so it may have more than its text.
    reported: the server's number; None: it has none.
    counted: our own count.
    text_bytes: the length of the text, which has at most one token for each byte.
    least: the least possible number.
    """
    if reported is None or not least <= reported <= max(allowed_tokens(job), text_bytes):
        return counted
    return reported


def seconds(header: str, most_s: int) -> int | None:
    """Return the seconds of a `Retry-After`, limited to 1…`most_s`; None if it is not a whole number."""
    header = header.strip()
    return max(1, min(int(header), most_s)) if _SECONDS.fullmatch(header) else None


def excerpt(quoted: str | bytes, length: int = EXCERPT_LENGTH) -> str:
    """Return the beginning of a text as one printable line."""
    text = quoted[:length].decode(errors="replace") if isinstance(quoted, bytes) else quoted[:length]
    return printable(text, blank=True).strip()
