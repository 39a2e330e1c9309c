"""Failures outside the child: receivers that raise, and a socket that cannot send."""

import errno
import os

import pytest
import trio

from engine.worker import fake_child
from engine.worker.children import (
    ENDLESS,
    GRANT,
    Stream,
    has_ended,
    running,
    running_until_failure,
    submit,
    wait_for_counts,
    worker,
)
from fairlead.base import messages
from fairlead.base.errors import EngineFailed, FairleadError, NodeFailed
from fairlead.base.job import Sampling


class Failing(Stream):
    """A receiver that raises at its third token, or at its end."""

    def __init__(self, *, at_its_end: bool = False) -> None:
        super().__init__()
        self.at_its_end = at_its_end

    def receive_token(self, token_id: int) -> None:
        super().receive_token(token_id)
        if not self.at_its_end and len(self.token_ids) == 3:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a detokenizer's bug")

    def receive(self, output: messages.Output) -> None:
        super().receive(output)
        raise ValueError("a detokenizer's bug")


@pytest.mark.parametrize("at_its_end", [False, True])
async def test_receiver_that_raises_ends_only_its_sequence(at_its_end):
    tested = worker()
    async with running(tested):
        failing = Failing(at_its_end=at_its_end)
        tested.sequences.submit([1], Sampling(max_tokens=20), failing, grant=GRANT)
        _, other = submit(tested, [2], Sampling(max_tokens=20))
        await failing.ended.wait()
        await other.ended.wait()
        await wait_for_counts(tested, running=0, slots_free=4)
    assert fake_child.answer([2], 20) == other.token_ids
    assert other.ends == ["length"]
    error = failing.ends[-1]
    assert isinstance(error, EngineFailed)
    assert "a detokenizer's bug" not in error.message, "an exception may contain client text"


async def test_receiver_that_raises_in_failed_does_not_affect_others():
    class RaisesInFailed(Stream):
        def failed(self, error: FairleadError) -> None:
            super().failed(error)
            raise RuntimeError("a bug")

    tested = worker("die_after=3")
    raising, other = RaisesInFailed(), Stream()
    async with running_until_failure(tested) as errors:
        tested.sequences.submit([1], ENDLESS, raising, grant=GRANT)
        tested.sequences.submit([2], ENDLESS, other, grant=GRANT)
    assert list(map(type, errors)) == [NodeFailed]
    assert list(map(type, raising.ends)) == [NodeFailed]
    assert list(map(type, other.ends)) == [NodeFailed]


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
async def test_message_that_cannot_be_sent_ends_the_child(number):
    async def send_all(_data):
        raise trio.BrokenResourceError from OSError(number, os.strerror(number))

    tested = worker()
    async with running_until_failure(tested) as errors:
        tested.sequences._connection._stream.send_all = send_all
        _, stream = submit(tested, [1], ENDLESS)
    (error,) = errors
    assert isinstance(error, NodeFailed)
    assert os.strerror(number) in error.message
    assert list(map(type, stream.ends)) == [NodeFailed]
    assert has_ended(tested.pid)
