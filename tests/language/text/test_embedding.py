"""`read_embedding` reads from a model's files whether it returns embeddings, and of which size."""

import json

import pytest

from fairlead.base.errors import LoadFailed
from fairlead.language.text.embedding import EmbeddingSettings, read_embedding

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
        ([TRANSFORMER, POOLING], {"hidden_size": 48}, EmbeddingSettings(48, normalized=False)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"hidden_size": 48}, EmbeddingSettings(48, normalized=True)),
        (
            [TRANSFORMER, POOLING],
            {"text_config": {"hidden_size": 24}},
            EmbeddingSettings(24, normalized=False),
        ),
    ],
)
def test_embedding_size_and_normalization_are_read_from_the_files(modules, config, expected, tmp_path):
    assert expected == read_embedding(written(tmp_path, modules, config))


def test_model_without_modules_json_is_not_an_embedding_model(tmp_path):
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
def test_error_names_the_file_that_is_invalid(modules, config, file, tmp_path):
    with pytest.raises(LoadFailed) as refused:
        read_embedding(written(tmp_path, modules, config))
    assert str(tmp_path / file) in refused.value.message
