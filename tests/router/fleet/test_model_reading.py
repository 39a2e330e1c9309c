"""What is logged when a model's files are read."""

import json

import pytest
import structlog

from fairlead.base.config import ModelConfig
from fairlead.router.fleet.model_reading import read_model
from language.text.model_folders import NO_TENSORS, write_folder
from language.text.vocabularies import library


@pytest.mark.parametrize(
    ("written", "lost"),
    [("<s>{{ m.content }}</s>", []), ("{{ '%s%s' % ('<s>', m.content) }}</s>", ["<s>"])],
)
async def test_control_tokens_that_a_template_loses_are_logged(tmp_path, written, lost):
    library("llama").save(str(tmp_path / "tokenizer.json"))
    template = f"{{% for m in messages %}}{written}{{% endfor %}}"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}')
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with structlog.testing.capture_logs() as lines:
        model = await read_model(
            ModelConfig(name="small", path=str(tmp_path)), on_progress=lambda *progress: None
        )
    assert model.name == "small"
    assert [(line["model"], line["tokens"]) for line in lines] == [("small", lost)] * bool(lost)


async def test_end_tokens_that_the_network_lacks_are_logged(tmp_path):
    write_folder(tmp_path, config={"vocab_size": 100, "eos_token_id": [2, 100, 32000]})
    with structlog.testing.capture_logs() as lines:
        await read_model(ModelConfig(name="small", path=str(tmp_path)), on_progress=lambda *progress: None)
    (line,) = lines
    assert (line["event"], line["model"], line["ids"]) == ("end tokens are ignored", "small", (100, 32000))
