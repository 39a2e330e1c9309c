"""Sampling parameters: each is declared once for all dialects, and converted by its name."""

import pytest

from fairlead.base.job import Sampling
from fairlead.dialects.fields import CommonFields, SamplingParameters

# Every dialect has its own form of these, or of what they are made from.
IN_DIALECTS = {"max_tokens", "logprobs", "grammar", "grammar_bytes", "reasoning_limit", "close_at_limit"}
CHANGED = {
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "repeat_last_n": 64,
    "logit_bias": {"3": 1.5},
    "allowed_token_ids": [4, 6],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "prompt_logprobs": 2,
}
CONVERTED = {"logit_bias": {3: 1.5}, "allowed_token_ids": (4, 6), "stop_token_ids": (4, 5)}


def test_each_sampling_parameter_of_the_engine_is_declared_for_dialects():
    declared = set(SamplingParameters.__struct_fields__) - set(CommonFields.__struct_fields__)
    assert declared == set(Sampling.__struct_fields__) - IN_DIALECTS
    assert declared == set(CHANGED)


@pytest.mark.parametrize("name", CHANGED)
async def test_sampling_parameter_of_a_request_reaches_its_job(client, chat, name):
    await client.post("/v1/chat/completions", chat())
    await client.post("/v1/chat/completions", chat(**{name: CHANGED[name]}))
    usual, changed = (job.sampling for job in client.gateway.jobs)
    assert getattr(changed, name) == CONVERTED.get(name, CHANGED[name])
    others = set(Sampling.__struct_fields__) - {name}
    assert {other: getattr(changed, other) for other in others} == {
        other: getattr(usual, other) for other in others
    }
