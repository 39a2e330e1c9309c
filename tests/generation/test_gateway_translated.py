"""A gateway over two servers, one of which fails, and neither or only one of which speaks the dialect."""

import msgspec
import pytest

from fairlead.base.errors import NodeFailed, NodeRefused
from fairlead.base.job import Delta, Job, Sampling
from generation.test_gateway_relayed import BEFORE, BETWEEN, ONLY_STREAMS, fleet
from nodes.listening import translated_job
from nodes.stub_server import text

OPENAI = ("openai",)


def new_job(*, stream: bool = True, **sampling: object) -> Job:
    job = translated_job(stream=stream)
    return msgspec.structs.replace(job, sampling=Sampling(max_tokens=10, **sampling))


def joined(deltas: list[Delta]) -> Delta:
    whole = Delta(0)
    for delta in deltas:
        whole.merge(delta)
    return whole


@pytest.mark.parametrize(
    ("stream", "how", "after"),
    [*((False, *fault) for fault in BEFORE), *((True, *fault) for fault in BEFORE + ONLY_STREAMS)],
)
async def test_failure_before_the_answer_is_hidden_from_the_client(stream, how, after):
    async with fleet(dialects=(OPENAI, OPENAI), how=how, after=after) as running:
        whole = joined(await running.deltas_of(new_job(stream=stream)))
        assert (len(running.failing.jobs), len(running.working.jobs)) == (1, 1)
    assert (whole.text, whole.relayed_tokens, whole.raw) == (text(), 8, [])


@pytest.mark.parametrize("dialects", [(OPENAI, OPENAI), (OPENAI, None), (None, OPENAI)])
@pytest.mark.parametrize(("how", "after"), BETWEEN)
async def test_repeatable_stream_resumes_at_the_other_server(how, after, dialects):
    async with fleet(dialects=dialects, how=how, after=after, waits=True) as running:
        deltas = await running.deltas_of(new_job(temperature=0))
        assert [len(server.jobs) for server in (running.failing, running.working)] == [1, 1]
    assert "".join(delta.text for delta in deltas) == text()
    is_raw = [bool(delta.raw) for delta in deltas if delta.text]
    assert (is_raw[0], is_raw[-1]) == (dialects[0] is None, dialects[1] is None)
    if None not in dialects:
        assert joined(deltas).relayed_tokens == 8


async def test_unrepeatable_stream_is_an_error_once_some_of_it_was_read():
    async with fleet(dialects=(OPENAI, OPENAI), how="reset", after=4, waits=True) as running:
        with pytest.raises(NodeFailed):
            await running.deltas_of(new_job())
        assert running.working.jobs == []


@pytest.mark.parametrize("stream", [False, True])
async def test_jobs_refused_by_a_full_server_run_on_the_other(stream, mock_clock):
    async with fleet(dialects=(OPENAI, OPENAI), how="status", after=429) as running:
        for _ in range(3):
            await running.deltas_of(new_job(stream=stream))
        assert (len(running.failing.jobs), len(running.working.jobs)) == (1, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_refused_by_a_server_is_not_sent_to_another(stream):
    async with fleet(dialects=(OPENAI, OPENAI), how="status", after=422) as running:
        with pytest.raises(NodeRefused) as refused:
            await running.deltas_of(new_job(stream=stream))
        assert (refused.value.status, refused.value.body, running.working.jobs) == (422, b"", [])
