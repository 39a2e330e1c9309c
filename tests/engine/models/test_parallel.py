"""A model on two or three ranks computes what one process computes, and each rank reads only its part."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import transformers
from safetensors import safe_open

from engine.models.rank_threads import TIMEOUT, on_ranks
from engine.models.test_agreement import CONFIGS, rounding_of
from engine.models.test_through_the_engine import EngineDriver
from engine.models.tiny import SHAPE, SIZES, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.engine import loading, process_groups
from fairlead.engine.devices import find_device
from fairlead.engine.models.loader import WeightSource, read_source
from fairlead.engine.models.parallel import Ranks, Shard, SharedEmbedding, SummedLinear, refusal
from fairlead.engine.ranks import ReceivedTables
from language.text.model_folders import NO_TENSORS

BIASED = "llama, biases, linear rope"
ONE_KV_HEAD = "qwen3, tied, biases, one KV head, upper layers slide, llama3 rope"
FAMILIES = (
    BIASED,
    "mistral, wide heads, one KV head, yarn rope",
    "qwen2, tied",
    ONE_KV_HEAD,
    "qwen3-moe, a dense layer, weights that do not add up",
    "mixtral",
    "gemma3, two windowed layers around a full one",
    pytest.param("gemma3, untied, biases, linear rope, capped logits", marks=pytest.mark.nightly),
)
PROMPTS = [prompt_of(length) for length in (1, 17, 33, 90)]
GREEDY = Sampling(max_tokens=16, temperature=0)
CACHE = {"kv_cache_bytes": 4 << 20}


class Recorder:
    """A forward that keeps all its logits."""

    def __init__(self, forward):
        self.logits = []
        self.forward = forward
        self.device, self.vocab_size = forward.device, forward.vocab_size
        self.samples_several = forward.samples_several
        self.columns = forward.columns

    def __call__(self, inputs):
        logits = self.forward(inputs)
        self.logits.append(logits.clone())
        return logits


def recorded(loaded):
    """Return all logits of greedy texts after each of the prompts, and the texts."""
    loaded.runner.forward = recorder = Recorder(loaded.runner.forward)
    texts = generate(loaded, PROMPTS, GREEDY)
    loaded.runner.forward = recorder.forward
    return torch.cat(recorder.logits).float(), texts


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def norm_of_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return save(CONFIGS[request.param], directory), directory


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """The folder of a Llama with all biases, and what one process computes with it."""
    directory = tmp_path_factory.mktemp("model")
    save(CONFIGS[BIASED], directory)
    return directory, *recorded(load(directory, compiled=False, **CACHE))


def test_two_ranks_compute_the_logits_and_texts_of_one_process(saved):
    reference, directory = saved
    one = load(directory, compiled=False, **CACHE)
    logits, texts = recorded(one)
    assert len({token for text in texts for token in text}) > 20  # varied enough to be a test
    with on_ranks(directory, **CACHE) as ranks:
        two = ranks.loaded[0]
        actual_logits, actual_texts = recorded(two)
        assert texts == actual_texts
        assert texts == generate(two, PROMPTS, GREEDY, ahead=True)
    bound = 1e-4 + rounding_of(reference, PROMPTS[-1] + texts[-1])[0]
    assert relative_error(actual_logits, logits) <= bound


def test_sums_have_the_same_bits_on_every_rank(tmp_path):
    """Else the routers of ranks could choose different experts for a token."""
    sums = {}

    def add(rank):
        ranks = Ranks(rank, 4)
        process_groups.connect(ranks, str(tmp_path / "store"), torch.device("cpu"), timeout=TIMEOUT)
        generator = torch.Generator().manual_seed(rank)
        made = [torch.randn(size, generator=generator) for size in (1, 7, 1000, 50_000)]
        sums[rank] = [ranks.sum(one.to(dtype)) for one in made for dtype in (torch.float32, torch.bfloat16)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    for rank in (1, 2, 3):
        assert all(map(torch.equal, sums[0], sums[rank]))


@pytest.mark.parametrize(
    ("size", "sizes", "vocabularies"),
    [
        (3, {"num_key_value_heads": 3, "intermediate_size": 81}, [107, 107, 108]),
        (4, {"num_attention_heads": 8}, [80, 81, 80, 81]),  # two ranks for each of the two KV heads
    ],
)
def test_more_ranks_share_kv_heads_and_divide_a_vocabulary_unevenly(size, sizes, vocabularies, tmp_path):
    save(transformers.LlamaConfig(**{**SIZES, "vocab_size": 322, **sizes}), tmp_path)
    logits, texts = recorded(load(tmp_path, compiled=False, **CACHE))
    with on_ranks(tmp_path, size, **CACHE) as ranks:
        networks = [ranks.loaded[rank].runner.forward.model for rank in range(1, size)]
        actual_logits, actual_texts = recorded(ranks.loaded[0])
    assert [len(network.embedding.table) for network in networks] == vocabularies[1:]
    assert {network.shape.kv_heads for network in networks} == {1}
    assert texts == actual_texts
    assert relative_error(actual_logits, logits) <= 1e-4


def test_each_rank_has_its_share_of_weights_cache_and_threads(tmp_path, monkeypatch):
    save(CONFIGS["qwen3"], tmp_path)
    one = load(tmp_path, compiled=False, **CACHE)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with on_ranks(tmp_path, threads=6, **CACHE) as ranks:
        two, forward = ranks.loaded[0], ranks.loaded[1].runner.forward
    assert (forward.cache.heads, forward.model.shape.heads) == (1, 3)
    assert CACHE["kv_cache_bytes"] // 2 >= forward.cache.nbytes
    assert (two.kv_cache_bytes, two.blocks_total) == (2 * forward.cache.nbytes, one.blocks_total)
    whole = sum(norm.nbytes for norm in norms(forward.model))
    assert one.weight_bytes + whole == two.weight_bytes
    assert two.kernel == "torch × 2"
    assert threads == [3, 3]


class HalfFreeGpu:
    """A device's memory of which this process has taken little, and another one half."""

    def free_and_total(self):
        return 500 << 20, 1000 << 20

    def taken(self):
        return 100 << 20


@pytest.mark.parametrize(
    ("limits", "expected_mb"),
    [
        ({}, 450),  # 90 % of what is free
        ({"gpu_memory": 0.4}, 270),  # 400 MiB without the 100 that are taken
        ({"gpu_memory": 300}, 180),
        ({"gpu_memory": 0.4, "kv_cache_bytes": 300 << 20}, 150),  # a half of all for each of two
        ({"kv_cache_bytes": 300 << 20}, 150),
    ],
)
def test_cache_of_a_rank_fits_its_own_gpu(limits, expected_mb):
    spec = WorkerSpec(path="x", parallel=2, **limits)
    assert loading._cache_size(spec, HalfFreeGpu(), 0, 2) >> 20 == expected_mb


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [str(find_device("auto", Ranks(rank, 2))) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert [str(find_device("cuda:2", Ranks(rank, 2))) for rank in (0, 1)] == ["cuda:2", "cuda:3"]
    assert str(find_device("cpu", Ranks(1, 2))) == "cpu"
    with pytest.raises(
        LoadFailed, match="parallel: 4 CUDA devices from cuda:1 on are needed, and torch has 4"
    ):
        find_device("cuda:1", Ranks(0, 4))


def norms(network):
    """Yield the weights that each rank has whole, as they are stored."""
    yield network.norm.scale
    for layer in network.layers:
        yield from (layer.attention_norm.scale, layer.mlp_norm.scale)
        yield from layer.attention.head_norm.scale[:2]  # one for all queries, and one for all keys


@pytest.mark.parametrize(
    ("name", "kv_share"),
    [
        (BIASED, 2),
        (ONE_KV_HEAD, 1),
        ("mixtral", 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_rank_reads_only_its_part_of_each_tensor(name, kv_share, dtype, tmp_path, monkeypatch):
    save(CONFIGS[name], tmp_path)
    opened = []
    original = WeightSource.weights

    def weights(source, device, report):
        opened.append(original(source, device, report))
        return opened[-1]

    monkeypatch.setattr(WeightSource, "weights", weights)
    with on_ranks(tmp_path, dtype=dtype, **CACHE):
        pass
    expected = 0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for tensor in file.keys():  # noqa: SIM118  it is no dictionary
            size = 4 * math.prod(file.get_slice(tensor).get_shape())
            if (
                "norm" in tensor
                or ".gate.weight" in tensor
                or tensor.endswith(("o_proj.bias", "down_proj.bias"))
            ):
                expected += size
            else:
                expected += size // (kv_share if "k_proj" in tensor or "v_proj" in tensor else 2)
    assert [expected, expected] == [one.bytes_read for one in opened]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_errors_are_at_most_1_5_times_those_of_one_process(dtype, biased):
    directory, exact, _ = biased
    one, _ = recorded(load(directory, compiled=False, dtype=dtype, **CACHE))
    with on_ranks(directory, dtype=dtype, **CACHE) as ranks:
        two, _ = recorded(ranks.loaded[0])
    first = len(PROMPTS)  # the texts may differ after their first tokens
    assert 0 < norm_of_error(two[:first], exact[:first]) < 1.5 * norm_of_error(one[:first], exact[:first])


def test_int8_error_is_at_most_1_5_times_that_of_one_process(biased):
    directory, exact, _ = biased
    one, _ = recorded(load(directory, compiled=False, quantization="int8", **CACHE))
    with on_ranks(directory, quantization="int8", **CACHE) as ranks:
        two, _ = recorded(ranks.loaded[0])
        assert ranks.loaded[0].weight_bytes < 0.7 * load(directory, compiled=False, **CACHE).weight_bytes
    first = len(PROMPTS)
    assert 0 < norm_of_error(two[:first], exact[:first]) < 1.5 * norm_of_error(one[:first], exact[:first])


def test_engine_reuses_prefixes_and_preempts_on_two_ranks(biased):
    directory, *_ = biased
    one = load(directory, compiled=False, slots=40, **CACHE)
    shared, sampling = prompt_of(50), Sampling(max_tokens=12, temperature=0)
    prompts = [shared + prompt_of(length, seed=length) for length in (1, 17, 40)] + [prompt_of(33)]
    expected = [generate(one, [prompt], sampling)[0] for prompt in prompts]

    def preempt(engine):
        preempted = engine._scheduler._running.newest_of_the_lowest_class()
        if preempted is not None and engine.statistics().steps % 5 == 0:
            engine._scheduler._preempt(preempted)

    with on_ranks(directory, **CACHE) as ranks:
        for overlaps in (False, True):
            served = EngineDriver(ranks.loaded[0], overlaps=overlaps)
            served.run_together([(shared, Sampling(max_tokens=1, temperature=0))])
            requests = [(prompt, sampling) for prompt in prompts]
            assert expected == served.run_together(requests, after_a_step=preempt)
            assert served.engine.statistics().prefix_hits >= 3 * 48
            assert served.engine.statistics().preemptions >= 2
            ranks.loaded[0].runner.release([[0, 1, 2]])  # a rank that has ended would fail the next step


def test_logprobs_of_prompts_and_answers_match_those_of_one_process(biased):
    directory, *_ = biased
    sampling = Sampling(max_tokens=6, temperature=0.7, seed=3, logprobs=4, prompt_logprobs=2)

    def scores(loaded):
        served = ScoringDriver(loaded)
        served.run_together([(prompt_of(60), sampling), (prompt_of(20), sampling)])
        return served.tokens, torch.tensor(served.logprobs)

    tokens, logprobs = scores(load(directory, compiled=False, slots=40, max_batched_tokens=24, **CACHE))
    assert len(tokens) == 59 + 19 + 2 * 6
    with on_ranks(directory, max_batched_tokens=24, **CACHE) as ranks:
        actual_tokens, actual_logprobs = scores(ranks.loaded[0])
    assert tokens == actual_tokens
    assert (actual_logprobs - logprobs).abs().max() < 1e-3


class ScoringDriver(EngineDriver):
    """An engine driver that collects log-probabilities, too: those of the prompts come with the outputs."""

    def __init__(self, loaded):
        super().__init__(loaded, overlaps=False)
        self.tokens, self.logprobs = [], []

    def collect(self, outcome):
        super().collect(outcome)
        for output in outcome.outputs:
            for one in (*output.prompt_logprobs, *output.logprobs):
                self.tokens.append((output.key, one.token_id, [token for token, _ in one.top]))
                self.logprobs.append(one.logprob)


def patched(owner, name, value):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


MUTANTS = {
    "sums are forgotten": patched(SummedLinear, "__call__", lambda self, x: self._part(x) + self._bias),
    "each rank adds the bias": patched(
        SummedLinear, "__call__", lambda self, x: self._total(self._part(x) + self._bias)
    ),
    "embeddings of other ranks are not zero": patched(
        SharedEmbedding,
        "__call__",
        lambda self, ids: self._total(self.table.index_select(0, ids % len(self._tokens))),
    ),
    "the vocabulary begins at 0 on each rank": patched(
        SharedEmbedding,
        "__init__",
        lambda self, table, tokens, total: self.__dict__.update(
            table=table, _tokens=range(len(tokens)), _total=total
        ),
    ),
    "columns are always the first": patched(
        Shard,
        "columns",
        lambda self, part, size: range(size // self.ranks.size if part in ("output", "down") else size),
    ),
    "logits are in the wrong order": patched(
        torch,
        "cat",
        lambda parts, *dim, cat=torch.cat: cat(list(parts)[::-1] if dim == (-1,) else parts, *dim),
    ),
    "block tables are not changed": patched(ReceivedTables, "apply", lambda self, step: None),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_changes_logits_by_more_than_ten_times_the_bound(name, biased, monkeypatch):
    directory, logits, _ = biased
    MUTANTS[name](monkeypatch)
    with on_ranks(directory, **CACHE) as ranks:
        actual, _ = recorded(ranks.loaded[0])
    assert relative_error(actual, logits) > 1e-3


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 4, "its 6 attention heads cannot be divided by 4"),
        ({}, 3, "3 is neither a divisor nor a multiple of its 2 KV heads"),
        ({"intermediate_size": 81}, 2, "its MLPs' inner size, 81, cannot be divided by 2"),
        ({"vocab_size": 1}, 2, "its vocabulary has only 1 tokens"),
        ({"headless": True}, 2, "models that make embeddings or scores are not divided"),
        ({}, 2, None),
        ({}, 6, "its MLPs' inner size, 80, cannot be divided by 6"),
        ({"intermediate_size": 84}, 6, None),
    ],
)
def test_network_that_cannot_be_divided_is_refused(changes, ranks, reason):
    assert reason == refusal(msgspec.structs.replace(SHAPE, **changes), ranks)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.LlamaConfig(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}),
            "its 3 attention",
        ),
        (
            transformers.Qwen3MoeConfig(**{**SIZES, "moe_intermediate_size": 41}, num_experts=9),
            "its experts' inner size, 41, cannot be divided by 2",
        ),
        (
            transformers.GraniteConfig(**{**SIZES, "head_dim": 16}),
            "only our own model families can be divided",
        ),
    ],
)
def test_refusal_names_the_setting_and_the_file(config, reason, tmp_path):
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    with pytest.raises(LoadFailed) as caught:
        read_source(tmp_path, device=torch.device("cpu"), ranks=Ranks(0, 2))
    assert f"{tmp_path / 'config.json'}: parallel: {reason}" in caught.value.message


def test_model_that_makes_embeddings_is_refused(tmp_path):
    config = CONFIGS["qwen3"]
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    modules = [{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(LoadFailed, match="parallel: models that make embeddings or scores are not divided"):
        read_source(tmp_path, device=torch.device("cpu"), needs_head=False, ranks=Ranks(0, 2))
