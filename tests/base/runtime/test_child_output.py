"""The output of child processes is read by lines, also after a failed read."""

import trio
from trio.testing import memory_stream_one_way_pair

from fairlead.base.runtime.child_output import LONGEST_LINE_BYTES, RETRY_S, read_lines


class FailingOnceStream(trio.abc.ReceiveStream):
    """A stream that fails at the second read."""

    def __init__(self) -> None:
        self._answers = [b"be", trio.BrokenResourceError(), b"fore\nafter\n", b""]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def aclose(self) -> None:
        pass


async def test_failed_read_is_reported_and_repeated(autojump_clock):
    lines: list[str] = []
    await read_lines(FailingOnceStream(), lines.append)
    assert lines == ["(its output cannot be read: BrokenResourceError())", "before", "after"]
    assert trio.current_time() == RETRY_S


async def test_long_lines_are_truncated_and_invalid_bytes_replaced():
    sender, receiver = memory_stream_one_way_pair()
    await sender.send_all(b"x" * 3 * LONGEST_LINE_BYTES + b"\nb\xff\n")
    await sender.aclose()
    lines: list[str] = []
    await read_lines(receiver, lines.append)
    assert lines == ["x" * LONGEST_LINE_BYTES, "b\N{REPLACEMENT CHARACTER}"]


async def test_partial_line_is_kept_when_reading_is_cancelled(autojump_clock):
    sender, receiver = memory_stream_one_way_pair()
    await sender.send_all(b"whole\nhalf")
    lines: list[str] = []
    with trio.move_on_after(1):
        await read_lines(receiver, lines.append)
    assert lines == ["whole", "half"]
