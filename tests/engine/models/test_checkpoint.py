"""A checkpoint of another kind: whatever reads a model gets documents and tensors through the protocol."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from engine.models.tiny import SIZES, load, save
from engine.test_cpu_step import Recorder, last_logits
from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint import checkpoint
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.folder import read_folder
from fairlead.language.checkpoint.listing import TensorListing
from fairlead.language.checkpoint.tensor_file import TensorFile
from fairlead.language.text.model import TextModel
from fairlead.server.routes.ollama_details import read_files
from language.text.model_folders import write_folder

GENERATION = {"temperature": 0.25, "eos_token_id": 3}


class Entry:
    """A document in one file."""

    def __init__(self, name, text):
        self.name, self.text = name, text

    @property
    def stem(self):
        return Path(self.name).stem

    def is_file(self):
        return self.text is not None

    def read_bytes(self):
        if self.text is None:
            raise FileNotFoundError(2, "no such entry")
        return self.text.encode()

    def __str__(self):
        return f"one.file[{self.name}]"


class OneFile:
    """A JSON object of documents in one file, with the tensors in a second file beside it."""

    created = 77

    def __init__(self, path):
        self.path = path
        self.entries = json.loads(path.read_text())

    @classmethod
    def open(cls, path):
        return cls(path) if path.suffix == ".file" and path.is_file() else None

    def document(self, name):
        return Entry(name, self.entries.get(name))

    def documents(self, pattern):
        return [Entry(name, text) for name, text in sorted(self.entries.items()) if Path(name).match(pattern)]

    def tensors(self):
        tensors = self.path.with_name("model.safetensors")
        return TensorListing(tensors, TensorFile(tensors).tensors)


@pytest.fixture
def folder(tmp_path):
    """A folder of a model with a tokenizer and templates of several names."""
    folder = write_folder(tmp_path / "folder")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools: {{ messages[0].content }}")
    save(transformers.LlamaConfig(**SIZES), folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.fixture
def one_file(folder, monkeypatch):
    """The same model in one file, beside its tensors, and no longer in the folder."""
    path = folder.parent / "one.file"
    files = [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".safetensors"]
    path.write_text(json.dumps({str(each.relative_to(folder)): each.read_text() for each in files}))
    (folder / "model.safetensors").rename(path.with_name("model.safetensors"))
    monkeypatch.setattr(checkpoint, "KINDS", (*checkpoint.KINDS, OneFile.open))
    return path


def test_other_kind_of_checkpoint_has_the_same_text_side(folder, request):
    expected = TextModel.load(folder, name="m")
    files, described = read_files(folder, 0), read_folder(folder)
    found = TextModel.load(request.getfixturevalue("one_file"), name="m")
    chat = [{"role": "user", "content": "hi"}]
    assert found.chat_template.render(chat) == expected.chat_template.render(chat) == "hi"
    assert found.chat_template.render(chat, tools=[{}]) == "tools: hi"
    assert found.tokenizer.encode("hello there") == expected.tokenizer.encode("hello there")
    assert (found.eos_token_ids, found.defaults) == (expected.eos_token_ids, expected.defaults)
    assert found.defaults.temperature == 0.25
    assert found.created == 77
    assert read_files(found.path, 0) == files
    assert read_folder(found.path).spec == described.spec


@pytest.mark.parametrize("compiled", [False, True])
def test_other_kind_of_checkpoint_gives_the_same_logits(folder, request, compiled):
    logits = []
    for path in (folder, "one_file"):
        model = path if isinstance(path, Path) else request.getfixturevalue(path)
        loaded = load(model, kv_cache_bytes=4 << 20, compiled=compiled)
        loaded.runner.forward = Recorder(loaded.runner.forward)
        logits.append(last_logits(loaded, loaded.runner.forward))
    assert torch.equal(*logits)


def test_faults_name_the_document(one_file):
    entries = json.loads(one_file.read_text())
    entries["config.json"] = json.dumps(json.loads(entries["config.json"]) | {"hidden_size": "wide"})
    one_file.write_text(json.dumps(entries))
    with pytest.raises(LoadFailed, match=r"^one\.file\[config\.json\]: hidden_size: must be an integer"):
        read_folder(one_file)
    del entries["tokenizer.json"]
    one_file.write_text(json.dumps(entries))
    with pytest.raises(LoadFailed, match=r"^one\.file\[tokenizer\.json\] is missing"):
        TextModel.load(one_file, name="m")


def test_path_of_no_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    for path in (tmp_path / "model.bin", tmp_path / "absent"):
        with pytest.raises(LoadFailed, match="no such directory"):
            open_checkpoint(path)
