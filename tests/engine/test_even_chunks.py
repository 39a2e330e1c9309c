"""Texts to embed, in the engine without a model: how they are chunked, how they end, which are refused."""

import struct
from array import array
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine
from fairlead.engine.step import SampledTokens

BLOCK_SIZE = 4
ANYTHING = Sampling(max_tokens=7, temperature=0.3)


class RecordingRunner:
    """A runner that returns a text's token ids as its vector, and records the text's chunks."""

    overlaps = False
    samples_several = False
    columns: ClassVar[dict[str, int]] = {}
    arenas = 2

    def __init__(self) -> None:
        self.cuts: dict[int, list[int]] = {}
        self.restarts: set[int] = set()
        self._ids: dict[int, list[int]] = {}

    def launch(self, step, batch):
        vectors = {}
        for row in range(step.rows):
            first, last = step.query_starts[row], step.query_starts[row + 1]
            key = batch.state(step.slots[row]).key
            if step.positions[first] == 0:
                if key in self.cuts:
                    self.restarts.add(key)
                self.cuts[key], self._ids[key] = [], []
            assert len(self._ids[key]) == step.positions[first]
            self._ids[key] += step.input_ids[first:last]
            self.cuts[key].append(last - first)
            if last - 1 in set(step.sample_tokens):
                vectors[len(vectors)] = array("f", self._ids[key]).tobytes()
        self._picks = SampledTokens(array("i", [0] * step.samples), vectors=vectors)
        return self

    def wait(self):
        return self._picks


def engine_of(runner, *, embeds=True, **limits):
    limits = {"slots": 3, "max_batch": 3, "max_batched_tokens": 12, "blocks_total": 40, **limits}
    return Engine(
        runner,
        max_model_len=100,
        block_size=BLOCK_SIZE,
        vocab_size=50,
        eos_token_ids=(0,),
        draw_seed=lambda: 0,
        embeds=embeds,
        **limits,
    )


def embedded(runner, prompts, **limits):
    """Return the vector of each prompt; the engine must be idle within twice as many steps as tokens."""
    engine = engine_of(runner, **limits)
    for key, prompt in enumerate(prompts):
        engine.submit(key, prompt, ANYTHING, embed=True)
    vectors = {}
    for now_s in range(2 * sum(map(len, prompts)) + 2):
        if engine.idle:
            break
        step = engine.plan(float(now_s))
        outcome = engine.commit(step, runner.launch(step, engine.batch).wait())
        assert (outcome.keys, outcome.tokens) == (b"", b"")
        for output in outcome.outputs:
            assert (output.token_ids, output.finish_reason, output.error) == ([], "stop", None)
            vectors[output.key] = list(struct.unpack(f"<{len(output.vector) // 4}f", output.vector))
    assert engine.idle
    statistics = engine.statistics()
    assert statistics.blocks_free == statistics.blocks_total
    assert 0 == statistics.generated_tokens == statistics.cached_tokens == statistics.prefix_hits
    return vectors


def prompt_of(length, key):
    return [(7 * key + place) % 50 for place in range(length)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    budget=st.integers(1, 20),
)
def test_chunks_of_a_text_do_not_depend_on_the_texts_beside_it(lengths, slots, budget):
    limits = {"slots": slots, "max_batch": slots, "max_batched_tokens": budget, "blocks_total": 100}
    prompts = [prompt_of(length, key) for key, length in enumerate(lengths)]
    runner = RecordingRunner()
    assert dict(enumerate(prompts)) == embedded(runner, prompts, **limits)
    for key, prompt in enumerate(prompts):
        unbatched = RecordingRunner()
        embedded(unbatched, [prompt], **limits)
        assert unbatched.cuts[0] == runner.cuts[key]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=10),
    blocks=st.integers(11, 20),
    window=st.sampled_from([None, 8]),
)
def test_texts_that_do_not_fit_together_run_one_after_another(lengths, blocks, window):
    prompts = [prompt_of(length, key) for key, length in enumerate(lengths)]
    limits = {"blocks_total": blocks, "windows": (window,)}
    assert dict(enumerate(prompts)) == embedded(RecordingRunner(), prompts, **limits)


def test_preempted_text_starts_again_from_its_first_token():
    runner = RecordingRunner()
    engine = engine_of(runner)
    engine.submit(1, prompt_of(30, 1), ANYTHING, embed=True)
    engine.submit(2, prompt_of(25, 2), ANYTHING, embed=True)
    outputs = []
    while not engine.idle:
        step = engine.plan(0.0)
        outputs += engine.commit(step, runner.launch(step, engine.batch).wait()).outputs
        scheduler = engine._scheduler
        if engine.statistics().steps == 3:
            scheduler._preempt(scheduler.running_in(0))
    assert runner.restarts == {1}
    assert {1: prompt_of(30, 1), 2: prompt_of(25, 2)} == {
        output.key: list(array("f", output.vector)) for output in outputs
    }


def test_repeated_text_is_computed_again():
    runner = RecordingRunner()
    prompt = prompt_of(30, 1)
    assert {0: prompt, 1: prompt} == embedded(runner, [prompt, prompt], slots=1, max_batch=1)
    assert runner.cuts[0] == runner.cuts[1]
    assert sum(runner.cuts[1]) == 30


def test_end_of_sequence_token_does_not_end_a_text():
    assert embedded(RecordingRunner(), [[0, 0, 5, 0]]) == {0: [0, 0, 5, 0]}


@pytest.mark.parametrize("embeds", [True, False])
def test_request_for_the_other_kind_of_output_fails_alone(embeds):
    engine = engine_of(RecordingRunner(), embeds=embeds)
    engine.submit(1, [1, 2], ANYTHING, embed=not embeds)
    [output] = engine.take_outcome().outputs
    assert (
        output.key,
        output.error,
    ) == (1, "this model makes vectors, no text" if embeds else "this model makes no vectors")
    assert engine.idle


def test_aborted_text_gets_no_output_and_frees_its_blocks():
    runner = RecordingRunner()
    engine = engine_of(runner)
    engine.submit(1, prompt_of(30, 1), ANYTHING, embed=True)
    engine.submit(2, prompt_of(3, 2), ANYTHING, embed=True)
    step = engine.plan(0.0)
    pending = runner.launch(step, engine.batch)
    engine.abort(1)
    outputs = engine.commit(step, pending.wait()).outputs
    while not engine.idle:
        step = engine.plan(1.0)
        outputs += engine.commit(step, runner.launch(step, engine.batch).wait()).outputs
    assert [output.key for output in outputs] == [2]
    assert engine.statistics().blocks_free == engine.statistics().blocks_total
