"""Model folders with one fault each: all who read a folder refuse it, and with the same words.

They are `fairlead config check`, `fairlead doctor`, the server's own process, the dispatcher beside fronts,
and the process of the model.
"""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.models.tiny import load
from fairlead.base.config import Config, ConfigError, ModelConfig
from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.folder import read_folder
from fairlead.router.fleet.model_reading import read_files
from fairlead.server.cli import main
from fairlead.server.console import doctor
from fairlead.server.console.model_faults import faults_of
from fairlead.server.processes.dispatcher_role import _find_files
from language.text.model_folders import write_folder

INDEX = "model.safetensors.index"
SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
CONTEXT = "maxModelLen (--max-model-len): 513 is above the model's own limit of 512 tokens"
# What is written beside or instead of a good folder's files, and what is said of it.
FAULTS = {
    "no configuration": ({"config.json": None}, "config.json: No such file"),
    "no JSON": ({"config.json": "{"}, "config.json: not valid JSON"),
    "a half number": ({"config": {"hidden_size": 64.5}}, "config.json: hidden_size: must be an integer"),
    "a number as text": ({"config": {"vocab_size": "32000"}}, "config.json: vocab_size: must be an integer"),
    "null": ({"config": {"num_attention_heads": None}}, "config.json: num_attention_heads: must not be null"),
    "no architecture": ({"config": {"architectures": None}}, "config.json: architectures: must not be null"),
    "code": (
        {"config": {"auto_map": {"AutoModel": "modeling.Model"}}},
        "config.json: auto_map: the model needs code",
    ),
    "quantized": (
        {"config": {"quantization_config": {}}},
        "config.json: quantization_config.quant_method: is missing",
    ),
    "stored in bytes": ({"config": {"dtype": "int8"}}, "config.json: dtype: 'int8' is not supported"),
    "activation": ({"config": {"hidden_act": "relu"}}, "config.json: hidden_act: only silu"),
    "scaling": ({"config": {"rope_scaling": {"type": "yarn", "factor": 0}}}, "rope_scaling.factor: must be"),
    "no room": ({"config": {"max_position_embeddings": 1}}, "config.json: a limit of 1 tokens"),
    "top_k": ({"generation_config": {"top_k": 20.5}}, "generation_config.json: top_k: must be an integer"),
    "top_p": ({"generation_config": {"top_p": "0.9"}}, "generation_config.json: top_p: must be a number"),
    "temperature": ({"generation_config": {"temperature": -1}}, "generation_config.json: temperature: must"),
    "an end as text": ({"config": {"eos_token_id": "2"}}, "config.json: eos_token_id: must be a token id or"),
    "an end of generation": (
        {"generation_config": {"eos_token_id": [2, True]}},
        "generation_config.json: eos_token_id: must be a token id or a list of them, not [2, True]",
    ),
    "an end of a section": (
        {"config": {"text_config": {"eos_token_id": 2.5}}},
        "config.json: text_config.eos_token_id: must be a token id or a list of them, not 2.5",
    ),
    "no weights": ({"model.safetensors": None}, "neither model.safetensors nor model.safetensors.index"),
    "missing shards": ({INDEX: SHARDS}, "index.json: weight_map: model-1.safetensors and 1 more are missing"),
    "shard elsewhere": ({INDEX: {"weight_map": {"a": "../a"}}}, "index.json: weight_map: '../a' is not"),
    "a pointer to weights": (
        {"model.safetensors": "version https://git-lfs"},
        "model.safetensors: a header of",
    ),
    "cut weights": ({"model.safetensors": "x"}, "model.safetensors: 1 bytes are too few"),
    "no list": ({INDEX: {}}, "index.json: weight_map: is missing"),
    "pooling": ({"modules": [{"type": "Dense"}]}, "modules.json: only Transformer, Pooling, Normalize"),
    "too long": ({"settings": {"max_model_len": 513}}, CONTEXT),
}
# Forms of numbers and of null that are written elsewhere, and mean what they say.
GOOD = {
    "top_k of a float": {"generation_config": {"top_k": 20.0}},
    "null among the ends": {"generation_config": {"eos_token_id": [2, None]}},
    "no end": {"generation_config": {"eos_token_id": -1}},
    "positions of a float": {"config": {"max_position_embeddings": 2048.0}},
    "shorter": {"settings": {"max_model_len": 511}},
}


def write(directory: Path, change: dict) -> ModelConfig:
    """Write a folder with a change, and return the configuration of its model."""
    parts = {
        name: content for name, content in change.items() if not name.endswith(".json") and "." not in name
    }
    index = {name: change[name] for name in (INDEX,) if name in change}
    settings = parts.pop("settings", {})
    write_folder(directory, **parts, **index)
    for name in ("config.json", "model.safetensors"):
        if name in change:
            (directory / name).unlink()
            if change[name] is not None:
                (directory / name).write_text(change[name])
    return ModelConfig(path=directory, name="odd", **settings)


def checked_file(model: ModelConfig) -> Path:
    """Write a configuration with this model, and return its path."""
    length = {} if model.max_model_len is None else {"maxModelLen": model.max_model_len}
    path = model.path.with_name("fairlead.json")
    path.write_text(json.dumps({"models": {"odd": {"path": str(model.path), **length}}}))
    return path


async def reasons(model: ModelConfig, capsys) -> list[str | None]:
    """Return what each reader says against a model's folder; None if nothing."""

    def of_child() -> None:
        load(model.path, max_model_len=model.max_model_len)

    found: list[str | None] = []
    for read in (lambda: read_files(model, model.path), of_child):
        try:
            read()
        except (LoadFailed, ConfigError) as error:
            found.append(str(error))
        else:
            found.append(None)
    try:
        await _find_files(model)
    except (LoadFailed, ConfigError) as error:
        found.append(str(error))
    else:
        found.append(None)
    file = checked_file(model)
    main(["config", "check", str(file), "--json"])
    found.append(json.loads(capsys.readouterr().out)["faulty_models"].get("odd"))
    prefix = "odd cannot be loaded: "
    findings = doctor._configuration(file, doctor._reading(file))
    bad = [finding.found.removeprefix(prefix) for finding in findings if finding.verdict == "bad"]
    return [*found, *(bad or [None])]


@pytest.mark.parametrize(("change", "reason"), list(FAULTS.values()), ids=list(FAULTS))
async def test_all_readers_of_a_faulty_folder_give_the_same_reason(tmp_path, capsys, change, reason):
    model = write(tmp_path / "odd", change)
    found = await reasons(model, capsys)
    assert found[0] is not None
    assert reason in found[0]
    assert set(found) == {found[0]}


@pytest.mark.parametrize("change", list(GOOD.values()), ids=list(GOOD))
def test_numbers_and_null_in_other_forms_are_read_by_all(tmp_path, capsys, change):
    model = write(tmp_path / "odd", change)
    text = read_files(model, model.path)
    folder = read_folder(model.path, max_model_len=model.max_model_len)
    assert (folder.max_model_len, folder.defaults) == (text.max_model_len, text.defaults)
    assert main(["config", "check", str(checked_file(model))]) == 0
    found = doctor._configuration(checked_file(model), doctor._reading(checked_file(model)))
    assert [finding.verdict for finding in found] == ["good"]


def test_what_only_transformers_knows_is_found_by_commands_as_by_the_models_process(tmp_path):
    odd = write(tmp_path / "odd", {"config": {"architectures": ["NoForCausalLM"]}})
    good = write(tmp_path / "good", {})
    config = Config(models=(odd, replace(good, name="good")))
    found = faults_of(config)
    with pytest.raises(LoadFailed) as refused:
        load(odd.path)
    assert found == {"odd": refused.value.message}
    assert "['NoForCausalLM'] is not supported" in found["odd"]
