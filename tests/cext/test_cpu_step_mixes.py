"""Random steps: a sequence's logits do not depend on its chunks or on the other rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cext.cpu_step_oracle import Network, Oracle, SequenceDriver, draw_weights, relative_error
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


def run_mix(driver, sequences, plan, oracle, tolerance):
    for counts in plan:
        rows = []
        for sequence, count in zip(sequences, counts, strict=False):
            remaining = len(sequence.token_ids) - sequence.computed
            if count and remaining:
                rows.append((sequence, min(count, remaining)))
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        if not rows:
            continue
        outputs = driver.step(rows)
        for sequence, _ in rows:
            if sequence.slot in outputs:
                expected = oracle.last_logits(sequence.token_ids)
                assert relative_error(outputs[sequence.slot], expected) <= tolerance
                sequence.token_ids.append(int(driver.rng.integers(NETWORK.vocab_size)))


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
@settings(max_examples=12)
@given(prompts=prompts, plan=steps, seed=st.integers(0, 1000), threads=st.integers(1, 3))
def test_any_mix_of_decodes_and_chunks_matches_the_numpy_network(kernel, prompts, plan, seed, threads):
    dtype, variant = kernel
    driver = SequenceDriver(
        NETWORK, dtype, variant=variant, threads=threads, seed=seed, weights=WEIGHTS[dtype], slots=6
    )
    sequences = [
        driver.add_sequence(driver.rng.integers(0, NETWORK.vocab_size, length)) for length in prompts
    ]
    run_mix(driver, sequences, plan, ORACLES[dtype], TOLERANCE[dtype])


def generate_greedily(driver, prompt, chunk, beside=()):
    """Return 12 greedy tokens after `prompt`, computed in chunks beside others, and the last logits."""
    sequence = driver.add_sequence(prompt)
    others = [driver.add_sequence(ids) for ids in beside]
    outputs = {}
    while len(sequence.token_ids) < len(prompt) + 12:
        rows = [(sequence, min(chunk, len(sequence.token_ids) - sequence.computed))]
        rows += [(other, min(5, len(other.token_ids) - other.computed)) for other in others]
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        outputs = driver.step(rows)
        for other, _ in rows:
            if other.slot in outputs:
                other.token_ids.append(int(outputs[other.slot].argmax()))
    return sequence.token_ids[len(prompt) :], outputs[sequence.slot]


@pytest.mark.parametrize("variant", variants("float32"))
def test_in_float32_other_rows_chunks_and_threads_change_no_bit(variant):
    network = Network(layers=3, heads=6, kv_heads=2, windows=(None, 60), groups=(0, 1, 0))
    weights = draw_weights(network, "float32")
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, network.vocab_size, 300)
    beside = [rng.integers(0, network.vocab_size, length) for length in (3, 40, 90)]

    def generate(chunk, beside, threads, seed):
        driver = SequenceDriver(
            network, "float32", variant=variant, threads=threads, seed=seed, weights=weights
        )
        return generate_greedily(driver, prompt, chunk, beside)

    tokens, logits = generate(300, (), 1, 0)
    for chunk, others_in_batch, threads, seed in (
        (300, beside, 1, 1),
        (64, (), 2, 2),
        (17, beside, 2, 3),
        (7, (), 1, 4),
    ):
        others_tokens, others_logits = generate(chunk, others_in_batch, threads, seed)
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
        driver = SequenceDriver(NETWORK, "bfloat16", variant=variant, threads=threads, weights=weights)
        results.append(generate_greedily(driver, prompt, 50, others_in_batch))
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
        driver = SequenceDriver(network, dtype, weights=weights, threads=2, variant=variant)
        overflowing, unaffected = driver.add_sequence([token] * 40), driver.add_sequence(range(20, 60))
        outputs = [driver.step([(overflowing, 40), (unaffected, 40)])]
        for _ in range(2):  # now fewer rows than a tile has, at other positions in it
            unaffected.token_ids.append(3)
            overflowing.token_ids.append(token)
            outputs.append(driver.step([(overflowing, 1), (unaffected, 1)]))
        assert (token == 7) == bool(np.isnan(outputs[0][overflowing.slot]).any())
        results.append([logits[unaffected.slot].tobytes() for logits in outputs])
    assert results[0] == results[1]
