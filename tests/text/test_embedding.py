"""What the parent reads of a model's files to know that it makes vectors, and of which length."""

import json

import pytest

from fairlead.errors import LoadFailed
from fairlead.text.embedding import Embedding, read_embedding

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def written(directory, modules, config):
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("modules", "config", "expected"),
    [
        ([TRANSFORMER, POOLING], {"hidden_size": 48}, Embedding(48, normalized=False)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"hidden_size": 48}, Embedding(48, normalized=True)),
        ([TRANSFORMER, POOLING], {"text_config": {"hidden_size": 24}}, Embedding(24, normalized=False)),
    ],
)
def test_the_files_say_what_the_vectors_are_like(modules, config, expected, tmp_path):
    assert expected == read_embedding(written(tmp_path, modules, config))


def test_a_model_without_modules_makes_text(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_embedding(tmp_path) is None


@pytest.mark.parametrize(
    ("modules", "config", "file"),
    [
        ({}, {"hidden_size": 48}, "modules.json"),
        ([1], {"hidden_size": 48}, "modules.json"),
        ([TRANSFORMER], {}, "config.json"),
        ([TRANSFORMER], {"hidden_size": 0}, "config.json"),
        ([TRANSFORMER], {"hidden_size": "wide"}, "config.json"),
    ],
)
def test_files_that_say_nothing_of_use_are_named(modules, config, file, tmp_path):
    with pytest.raises(LoadFailed) as refused:
        read_embedding(written(tmp_path, modules, config))
    assert str(tmp_path / file) in refused.value.message
