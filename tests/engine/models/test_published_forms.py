"""Published models' files, made small: parent, child and `config check` read what the makers document.

`published_forms` has what the files say, and what is to be read from them. Transformers reads the same. With
`--nightly` each model that makes text is also run, and its logits are those of transformers.
"""

import json

import pytest
import torch

from engine.models.published_folders import write
from engine.models.published_forms import FORMS, Reading
from engine.models.test_agreement import record_logits, reference_logits
from engine.models.tiny import generate, load, prompt_of
from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.engine.models.loader import read_source
from fairlead.language.text.model import TextModel
from fairlead.language.text.settings import GenerationDefaults
from fairlead.server.cli import main
from language.structured.families import FAMILIES

transformers = pytest.importorskip("transformers")

READ = {name: form for name, form in FORMS.items() if isinstance(form.expected, Reading)}
REFUSED = {name: form for name, form in FORMS.items() if isinstance(form.expected, str)}
NATIVE = [name for name, form in READ.items() if form.expected.native]
GENERATING = [name for name, form in READ.items() if form.expected.task == "generate"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that gives the folder of a form; it is written once."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("model")
            write(FORMS[name], folders[name])
        return folders[name]

    return folder_of


def texts(tokenizer, ids):
    return {tokenizer.decode([id_], skip_special_tokens=False) for id_ in ids}


def windows_of(expected, layers):
    windows = expected.windows
    return windows if isinstance(windows, tuple) else (windows,) * layers


@pytest.mark.parametrize("name", READ)
def test_parent_reads_context_ends_defaults_and_format(name, folder_of):
    form, expected = FORMS[name], FORMS[name].expected
    model = TextModel.load(folder_of(name), name="m")
    assert model.max_model_len == expected.context
    assert texts(model.tokenizer, model.eos_token_ids) == expected.ends
    assert model.defaults == GenerationDefaults(**expected.defaults)
    assert model.task == expected.task
    if form.family is not None:
        family, detected = FAMILIES[form.family], model.answer_format.detected
        assert detected.wire_format.name == family.format
        assert (detected.wire_format.reasoning is not None) == family.has_reasoning


@pytest.mark.parametrize("name", NATIVE)
def test_child_reads_the_network(name, folder_of):
    expected = FORMS[name].expected
    spec = read_source(folder_of(name), device=CPU, needs_head=False).spec
    at = next((layer for layer, window in enumerate(spec.windows) if window is None), 0)
    rope = spec.ropes[at]
    assert (spec.max_positions, spec.head_dim, spec.tied) == (
        expected.context,
        expected.head_dim,
        expected.tied,
    )
    assert spec.windows == windows_of(expected, spec.layers)
    assert (rope.kind, rope.theta, rope.factor) == expected.rope


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_file_and_the_key(name, folder_of):
    with pytest.raises((LoadFailed, ConfigError)) as caught:
        read_source(folder_of(name), device=CPU, needs_head=False)
    assert f"config.json: {FORMS[name].expected}" in caught.value.message


def check_config(paths, tmp_path, capsys):
    """Run `config check` on a file with these models' folders; return its status and what it prints."""
    file = tmp_path / "fairlead.yaml"
    file.write_text(json.dumps({"models": {name: {"path": str(path)} for name, path in paths.items()}}))
    status = main(["config", "check", str(file)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_config_check_reads_what_a_server_would(folder_of, tmp_path, capsys):
    """All in one file: each process that asks transformers for a model takes seconds to import it."""
    paths = {f"m{number}": folder_of(name) for number, name in enumerate(READ)}
    status, printed = check_config(paths, tmp_path, capsys)
    assert status == 0, printed
    for number, form in enumerate(READ.values()):
        if form.family is not None:
            assert f"wire format of m{number}: {FAMILIES[form.family].format}" in printed


@pytest.mark.parametrize("name", REFUSED)
def test_config_check_refuses_what_a_server_would(name, folder_of, tmp_path, capsys):
    status, printed = check_config({"m": folder_of(name)}, tmp_path, capsys)
    assert status != 0
    assert FORMS[name].expected in printed


# Compared with transformers ----------------------------------------------------------------------------


def head_dim_of(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def bounded(windows, context):
    """Return the windows without those of the whole context, which are none."""
    return tuple(None if window is None or window >= context else window for window in windows)


def windows_by_transformers(config):
    """Return the windows of the layers, which transformers keeps in one of three forms."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def ends_by_transformers(folder, config):
    """Return the ids that end what transformers generates, if a file names any."""
    if (folder / "generation_config.json").exists():
        found = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    elif "eos_token_id" in json.loads((folder / "config.json").read_text()):
        found = config.eos_token_id
    else:  # an id of the family, which the small vocabulary does not have
        found = None
    return found if isinstance(found, list) else [] if found is None else [found]


@pytest.mark.parametrize("name", READ)
def test_transformers_reads_the_same(name, folder_of):
    expected, folder = FORMS[name].expected, folder_of(name)
    whole = transformers.AutoConfig.from_pretrained(folder)
    config = whole.get_text_config()
    layers, context = config.num_hidden_layers, config.max_position_embeddings
    assert head_dim_of(config) == expected.head_dim
    assert config.tie_word_embeddings == expected.tied
    assert bounded(windows_by_transformers(config), context) == bounded(windows_of(expected, layers), context)
    if expected.rope is not None:
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        assert (rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)) == expected.rope
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert texts(tokenizer, ends_by_transformers(folder, whole)) <= expected.ends


@pytest.mark.parametrize("name", NATIVE)
def test_child_reads_the_sizes_that_transformers_reads(name, folder_of):
    folder = folder_of(name)
    spec = read_source(folder, device=CPU, needs_head=False).spec
    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    sizes = (
        spec.vocab_size,
        spec.hidden_size,
        spec.intermediate_size,
        spec.layers,
        spec.heads,
        spec.kv_heads,
    )
    assert sizes == (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    assert spec.norm_epsilon == config.rms_norm_eps
    scale = getattr(config, "query_pre_attn_scalar", spec.head_dim)
    assert spec.attention_scale == pytest.approx(scale**-0.5)


@pytest.fixture
def weighted(request, folder_of):
    """The folder of a form with random weights, and transformers' model with them."""
    folder = folder_of(request.param)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32).eval()
    saved = folder / "saved"
    model.save_pretrained(saved)  # names the tensors as published files do
    (saved / "model.safetensors").rename(folder / "model.safetensors")
    return request.param, folder, model


@pytest.mark.nightly
@pytest.mark.parametrize("weighted", GENERATING, indirect=True)
def test_model_is_loaded_and_its_logits_are_those_of_transformers(weighted, monkeypatch):
    name, folder, model = weighted
    expected, loaded = FORMS[name].expected, load(folder, kv_cache_bytes=4 << 20)
    if not expected.native:  # only the layers know
        shape = loaded.runner.forward.model.shape
        assert (shape.max_positions, shape.head_dim) == (expected.context, expected.head_dim)
        assert shape.windows == windows_of(expected, shape.layers)
    recorded = record_logits(loaded, monkeypatch)
    prompt = [id_ % 256 for id_ in prompt_of(30)]
    [output] = generate(loaded, [prompt], Sampling(max_tokens=6, temperature=0), max_batched_tokens=64)
    logits = reference_logits(model, prompt + output)[len(prompt) - 1 : -1]
    assert (torch.cat(recorded) - logits).abs().max() / logits.abs().max() <= 1e-4
