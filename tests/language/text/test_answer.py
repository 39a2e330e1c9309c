"""`ChoiceText` turns a sequence's outputs into exactly the text that its client may see."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.job import Delta, TokenLogprob
from fairlead.base.messages import Output
from fairlead.language.text.answer import ChoiceText
from language.text.vocabularies import loaded

TOKENIZER = loaded("byte_level")
END = TOKENIZER.token_id("<|end|>")


def ids_of(text):
    return TOKENIZER.encode(text)


def choice(*stops, **options):
    return ChoiceText(TOKENIZER, stops, 3, eos_token_ids=frozenset({END}), **options)


def test_delta_has_text_tokens_and_logprobs():
    ids = ids_of("hello")
    logprobs = [TokenLogprob(token_id, -1.0) for token_id in ids]
    assert Delta(3, "hello", ids, logprobs) == choice().push(Output(0, ids, logprobs))


def test_end_of_sequence_token_has_no_text_and_no_stop_reason():
    answer, ids = choice(), ids_of("hello")
    delta = answer.push(Output(0, [*ids, END], [], "stop", END))
    assert Delta(3, "hello", [*ids, END], [], "stop") == delta
    assert answer.ended


def test_client_stop_token_is_hidden_and_is_the_stop_reason():
    ids = ids_of("hello world")
    delta = choice().push(Output(0, ids, [], "stop", ids[-1]))
    assert Delta(3, TOKENIZER.decode(ids[:-1]), ids, [], "stop", ids[-1]) == delta


def test_stop_string_ends_the_answer_before_the_engine_does():
    answer, ids = choice("wor"), ids_of("hello world, hello")
    delta = answer.push(Output(0, ids))
    assert Delta(3, "hello ", ids, [], "stop", "wor") == delta
    assert answer.ended
    assert answer.push(Output(0, ids)) is None
    assert answer.push(Output(0, ids, [], "length")) is None


def test_stop_string_in_the_last_text_takes_precedence_over_length():
    ids = ids_of("hello world")
    delta = choice("world").push(Output(0, ids, [], "length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hello ", "stop", "world")


def test_partial_stop_string_is_returned_at_the_end_of_the_answer():
    answer, ids = choice("world!"), ids_of("hello world")
    assert answer.push(Output(0, ids)).text == "hello "
    assert Delta(3, "world", [END], [], "stop") == answer.push(Output(0, [END], [], "stop", END))


def test_incomplete_character_becomes_a_replacement_character_at_the_end():
    answer = choice()
    first_byte = next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == b"\xf0")
    assert Delta(3, "", [first_byte]) == answer.push(Output(0, [first_byte]))
    assert Delta(3, "\ufffd", [], [], "length") == answer.push(Output(0, [], [], "length"))


def test_empty_output_has_no_delta():
    assert choice().push(Output(0, [])) is None


def test_deltas_can_be_merged_without_changing_the_outputs():
    ids = ids_of("hello world")
    outputs = [Output(0, [token_id]) for token_id in ids]
    answer = choice()
    merged = answer.push(outputs[0])
    for output in outputs[1:]:
        merged.merge(answer.push(output))
    assert Delta(3, "hello world", ids) == merged
    assert [[token_id] for token_id in ids] == [output.token_ids for output in outputs]


def test_leading_blank_is_kept_after_a_context():
    tokenizer = loaded("llama")
    the = tokenizer.token_id("▁the")
    assert ChoiceText(tokenizer, (), 0).push(Output(0, [the])).text == "the"
    assert ChoiceText(tokenizer, (), 0, context=[the]).push(Output(0, [the])).text == " the"


@pytest.mark.parametrize("name", ["byte_level", "llama", "word_piece"])
@given(data=st.data())
def test_text_ends_before_the_first_stop_string(name, data):
    tokenizer = loaded(name)
    ids = data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=30))
    text = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 4))] or "none"
    answer, visible, reasons = ChoiceText(tokenizer, (stop,), 0), "", []
    for index, token_id in enumerate(ids):
        last = index == len(ids) - 1
        if (delta := answer.push(Output(0, [token_id], [], "length" if last else None))) is not None:
            visible += delta.text
            reasons.append(delta.finish_reason)
    assert text.partition(stop)[0] == visible
    assert (["stop" if stop in text else "length"] if ids else []) == reasons[-1:]
    assert all(reason is None for reason in reasons[:-1])
