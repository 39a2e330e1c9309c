"""Encoding of the prompts of one request as token ids."""

from array import array

import pytest

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.base.messages import pack_tokens
from fairlead.generation.encoding import LONG_PROMPT_TOKENS, encode_prompts


def test_texts_are_encoded_and_token_ids_kept(model):
    encoded = encode_prompts(model, ["hello world", [1, 2]], Limits(), "prompt")
    assert encoded == (model.tokenizer.encode("hello world"), [1, 2])


def test_many_ids_take_four_bytes_each_and_reach_the_engine_unchanged(model):
    ids = [n % 300 for n in range(LONG_PROMPT_TOKENS)]
    (encoded,) = encode_prompts(model, [ids], Limits(), "prompt")
    assert encoded == array("i", ids)
    assert pack_tokens(encoded) == pack_tokens(ids)


def test_total_tokens_of_a_request_are_bounded(model):
    encoded = []

    def prompts():
        for n in range(10):
            encoded.append(n)
            yield [1] * 4

    with pytest.raises(InvalidRequest, match="12 tokens are too many; a request may have 10") as caught:
        encode_prompts(model, prompts(), Limits(request_tokens=10), "input")
    assert caught.value.param == "input"
    assert encoded == [0, 1, 2]  # prompts after the bound are not encoded
