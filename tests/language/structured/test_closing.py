"""Answers that near their limit of tokens end within it, and fit their schema."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from fairlead.language.structured import closing
from fairlead.language.structured.closing import MARGIN, Closing, byte_ids
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.grammar import Calls, JsonAnswer, ToolGrammar, answer_grammar
from language.structured.rendering import WIRE_FORMATS, vocabulary
from language.structured.schemas import schema_of
from language.structured.test_wire_formats import parsed

MADE = vocabulary("hermes")
BYTES = byte_ids(MADE.matching)
TEXT = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "tags": {"type": "array", "items": TEXT}, "age": {"type": "integer"}},
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


def answer(grammar, most, seed, *, closes=True, likes="", ahead=False):
    """Return the text of a random answer of at most so many tokens, and whether it ended by itself.

    `ahead`: its masks are found as by a thread, before the steps that need them.
    """
    constraint = Constraint(LLMatcher(MADE.matching, grammar))
    if closes:
        constraint.closing = Closing(most, BYTES)
    chance, tokens = random.Random(seed), []
    mask = np.zeros((MADE.library.get_vocab_size() + 3 + 31) // 32, np.uint32)
    liked = {
        byte for byte in BYTES if byte is not None and MADE.tokenizer.token_bytes(byte) in likes.encode()
    }
    constraint.begin(constraint.matcher, None, constraint._renew, words=len(mask))
    while len(tokens) < most:
        if ahead:
            mask = constraint.find(tokens[-1:])
        else:
            constraint.consume(tokens[-1:])
            constraint.fill(mask)
        assert constraint.error is None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        token = chance.choice([one for one in allowed if one in liked] or allowed)
        if token == MADE.end:
            return MADE.library.decode(tokens), True
        tokens.append(token)
    return MADE.library.decode(tokens), False


@pytest.mark.parametrize("most", [60, 90, 300])
def test_answer_within_a_text_is_closed_before_its_limit(most):
    grammar = answer_grammar(JsonAnswer(PERSON))
    for seed in range(5):
        text, is_over = answer(grammar, most, seed, likes="abcdefgh {:[")
        assert is_over, text
        jsonschema.validate(json.loads(text), PERSON)
        assert not answer(grammar, most, seed, closes=False, likes="abcdefgh {:[")[1]


def test_mask_that_is_found_ahead_is_narrowed_as_one_of_a_step():
    grammar = answer_grammar(JsonAnswer(PERSON))
    for seed in range(3):
        written = answer(grammar, 90, seed, likes="abcdefgh {:[", ahead=True)
        assert written == answer(grammar, 90, seed, likes="abcdefgh {:[")
        assert written[1]


def test_answer_whose_rest_takes_too_long_to_find_is_cut_as_before(monkeypatch):
    monkeypatch.setattr(closing, "SEARCH_S", 0.0)
    grammar = answer_grammar(JsonAnswer(PERSON))
    cut = answer(grammar, 60, 1, closes=False, likes="abcdefgh {:[")
    assert answer(grammar, 60, 1, likes="abcdefgh {:[") == cut


def test_answer_is_not_closed_before_it_must_be():
    text, _ = answer(answer_grammar(JsonAnswer(TEXT)), 200, 1, likes="abc")
    assert 200 - 2 * MARGIN < len(text) <= 200


@pytest.mark.parametrize("seed", range(12))
def test_random_answers_of_random_schemas_are_closed(seed):
    schema = schema_of(seed)
    text, is_over = answer(answer_grammar(JsonAnswer(schema)), 900, seed)
    assert is_over, text
    jsonschema.validate(json.loads(text), schema)


def test_answer_whose_rest_does_not_fit_is_cut_as_before():
    grammar = answer_grammar(JsonAnswer({"type": "string", "minLength": 100}))
    assert answer(grammar, 50, 1, likes="abc") == answer(grammar, 50, 1, closes=False, likes="abc")


def test_call_is_closed_with_its_mark():
    body = Calls([ToolGrammar("f", PERSON)], is_required=True)
    grammar = answer_grammar(body, WIRE_FORMATS["hermes"], MADE.special)
    for seed in range(5):
        text, _ = answer(grammar, 220, seed, likes="abcdefgh ")
        ((name, arguments),) = parsed("hermes", [text], {"f": PERSON}).calls[:1]
        assert name == "f"
        jsonschema.validate(arguments, PERSON)
