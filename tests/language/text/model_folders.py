"""Writes small model folders that are complete but for their tensors: their weights have none."""

import json
from pathlib import Path
from typing import Any

from language.text.vocabularies import library

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, "eos_token_id": 2}

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def write_folder(directory: Path, *, config: dict[str, Any] | None = None, **files: object) -> Path:
    """Write a folder that `read_folder` accepts, and return it.

    `config` replaces keys of config.json. `files` are the contents of further JSON files by their names
    without the ending.
    """
    directory.mkdir(exist_ok=True)
    library("llama").save(str(directory / "tokenizer.json"))
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    for name, content in {**files, "config": CONFIG | (config or {})}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory
