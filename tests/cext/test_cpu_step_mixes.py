"""Random steps: a sequence's logits do not depend on its chunks or on the other rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cext.cpu_step_oracle import Network, Oracle, World, draw_weights, relative_error
from fairlead._cext.cpustep import variants

NETWORK = Network(layers=3, heads=6, kv_heads=2, windows=(None, 25), groups=(0, 1, 0), qkv_bias=True)
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
WEIGHTS = {dtype: draw_weights(NETWORK, dtype) for dtype in TOLERANCE}
ORACLES = {dtype: Oracle(NETWORK, weights) for dtype, weights in WEIGHTS.items()}
KERNELS = [(dtype, variant) for dtype in TOLERANCE for variant in variants(dtype)]

prompts = st.lists(st.integers(1, 70), min_size=1, max_size=6)
# For each step, how many tokens each sequence may compute (0: it is not in the step).
steps = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 3, 16, 29, 70]), min_size=6, max_size=6), min_size=1, max_size=8
)


def run_mix(world, speakers, plan, oracle, tolerance):
    for counts in plan:
        rows = []
        for speaker, count in zip(speakers, counts, strict=False):
            left = len(speaker.token_ids) - speaker.computed
            if count and left:
                rows.append((speaker, min(count, left)))
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        if not rows:
            continue
        said = world.step(rows)
        for speaker, _ in rows:
            if speaker.slot in said:
                expected = oracle.logits(np.array(speaker.token_ids))[-1]
                assert relative_error(said[speaker.slot], expected) <= tolerance
                speaker.token_ids.append(int(world.rng.integers(NETWORK.vocab_size)))


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
@settings(max_examples=12)
@given(prompts=prompts, plan=steps, seed=st.integers(0, 1000), threads=st.integers(1, 3))
def test_any_mix_of_decodes_and_chunks_matches_the_numpy_network(kernel, prompts, plan, seed, threads):
    dtype, variant = kernel
    world = World(
        NETWORK, dtype, variant=variant, threads=threads, seed=seed, weights=WEIGHTS[dtype], slots=6
    )
    speakers = [world.enter(world.rng.integers(0, NETWORK.vocab_size, length)) for length in prompts]
    run_mix(world, speakers, plan, ORACLES[dtype], TOLERANCE[dtype])


def conversation(world, prompt, chunk, beside=()):
    """Return 12 greedy tokens after `prompt`, computed in chunks beside others, and the last logits."""
    speaker = world.enter(prompt)
    others = [world.enter(ids) for ids in beside]
    said = {}
    while len(speaker.token_ids) < len(prompt) + 12:
        rows = [(speaker, min(chunk, len(speaker.token_ids) - speaker.computed))]
        rows += [(other, min(5, len(other.token_ids) - other.computed)) for other in others]
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        said = world.step(rows)
        for other, _ in rows:
            if other.slot in said:
                other.token_ids.append(int(said[other.slot].argmax()))
    return speaker.token_ids[len(prompt) :], said[speaker.slot]


@pytest.mark.parametrize("variant", variants("float32"))
def test_in_float32_other_rows_chunks_and_threads_change_no_bit(variant):
    network = Network(layers=3, heads=6, kv_heads=2, windows=(None, 60), groups=(0, 1, 0))
    weights = draw_weights(network, "float32")
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, network.vocab_size, 300)
    beside = [rng.integers(0, network.vocab_size, length) for length in (3, 40, 90)]

    def speak(chunk, beside, threads, seed):
        world = World(network, "float32", variant=variant, threads=threads, seed=seed, weights=weights)
        return conversation(world, prompt, chunk, beside)

    tokens, logits = speak(300, (), 1, 0)
    for chunk, others_in_batch, threads, seed in (
        (300, beside, 1, 1),
        (64, (), 2, 2),
        (17, beside, 2, 3),
        (7, (), 1, 4),
    ):
        others_tokens, others_logits = speak(chunk, others_in_batch, threads, seed)
        assert tokens == others_tokens
        assert logits.tobytes() == others_logits.tobytes()


@pytest.mark.parametrize("variant", variants("bfloat16"))
def test_in_bfloat16_other_rows_and_threads_change_no_bit_of_a_decode(variant):
    weights = draw_weights(NETWORK, "bfloat16")
    rng = np.random.default_rng(6)
    prompt = rng.integers(0, NETWORK.vocab_size, 50)
    beside = [rng.integers(0, NETWORK.vocab_size, length) for length in (3, 40, 90, 20)]
    results = []
    for others_in_batch, threads in (((), 1), (beside, 1), (beside[:2], 2)):
        world = World(NETWORK, "bfloat16", variant=variant, threads=threads, weights=weights)
        results.append(conversation(world, prompt, 50, others_in_batch))
    assert results[0][0] == results[1][0] == results[2][0]
    assert len({logits.tobytes() for _, logits in results}) == 1


@pytest.mark.parametrize("network", [NETWORK, Network(heads=3, kv_heads=1, head_dim=18, hidden_size=40)])
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_overflowing_sequence_does_not_change_other_sequences(kernel, network):
    """Not a bit may differ: an overflow must not reach the other sequences of a step."""
    dtype, variant = kernel
    weights = draw_weights(network, dtype)
    weights[None, "embedding"][:, 3] = 0
    weights[None, "embedding"][7, 3] = 100
    weights[0, "value"][:, 3] = 3e38
    results = []
    for token in (7, 8):
        world = World(network, dtype, weights=weights, threads=2, variant=variant)
        strange, fine = world.enter([token] * 40), world.enter(range(20, 60))
        said = [world.step([(strange, 40), (fine, 40)])]
        for _ in range(2):  # now fewer rows than a tile has, at other positions in it
            fine.token_ids.append(3)
            strange.token_ids.append(token)
            said.append(world.step([(strange, 1), (fine, 1)]))
        assert (token == 7) == bool(np.isnan(said[0][strange.slot]).any())
        results.append([logits[fine.slot].tobytes() for logits in said])
    assert results[0] == results[1]
