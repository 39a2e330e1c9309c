"""Model files in unsupported formats, and pickled weights: nothing reads them."""

import pickle

import pytest
import torch

from advisories.directories import (
    WEIGHTS,
    change_json,
    demonstration_copy,
    ggufs,
    pickled,
    refusal,
    transformers_model,
    write_torch_archive,
)
from advisories.tries import tries
from fairlead.base.errors import LoadFailed
from fairlead.engine.models.loader import load_model
from fairlead.language.text.hub import find_model
from fairlead.language.text.model import TextModel

GGUF = (
    "CVE-2024-21802",  # llama.cpp
    "CVE-2024-21825",
    "CVE-2024-21836",
    "CVE-2024-23496",
    "CVE-2024-23605",
    "CVE-2024-32878",
    "CVE-2024-41130",
    "CVE-2025-49847",
    "CVE-2025-53630",
    "CVE-2026-27940",
    "CVE-2026-33298",
    "CVE-2026-52131",
    "GHSA-g4cc-763q-h9h6",
    "CVE-2024-12055",  # Ollama
    "CVE-2024-39720",
    "CVE-2024-8063",
    "CVE-2025-0312",
    "CVE-2025-0313",
    "CVE-2025-0315",
    "CVE-2025-0317",
    "CVE-2025-66959",
    "CVE-2025-66960",
    "CVE-2026-5757",
    "CVE-2026-7482",
    "CVE-2026-65315",
    "CVE-2026-53923",  # vLLM
)
PICKLES = (
    "CVE-2025-24357",  # vLLM
    "GHSA-ggpf-24jw-3fcw",
    "CVE-2026-15976",  # SGLang
    "CVE-2025-3162",  # LMDeploy
    "CVE-2025-32434",  # torch
    "CVE-2024-3568",  # transformers
    "CVE-2024-11393",
    "CVE-2026-1839",
)
FORMS_OF_WEIGHTS = ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "model.pkl"]
BESIDE = [
    "adapter_model.bin",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "training_args.bin",
    "model.safetensors.pkl",
]


@pytest.fixture
def directory(tmp_path):
    return demonstration_copy(tmp_path / "model")


@tries(*GGUF)
def test_directory_with_only_a_gguf_is_refused(directory):
    (directory / WEIGHTS).unlink()
    for content in ggufs().values():
        (directory / "model.gguf").write_bytes(content)
        assert "safetensors" in refusal(directory)


@tries(*GGUF)
def test_gguf_in_place_of_weights_is_refused(directory):
    for content in ggufs().values():
        (directory / WEIGHTS).write_bytes(content)
        assert "safetensors" in refusal(directory)


@tries(*GGUF)
def test_malformed_gguf_is_refused_by_its_name_in_both_processes(tmp_path):
    file = tmp_path / "model.gguf"
    for content in ggufs().values():
        file.write_bytes(content)
        with pytest.raises(LoadFailed, match=r"model\.gguf"):
            TextModel.load(find_model(file), name="model")
        assert "model.gguf" in refusal(file)


@tries(*PICKLES)
@pytest.mark.parametrize("name", FORMS_OF_WEIGHTS)
def test_pickled_weights_are_not_read(directory, marker, name):
    (directory / WEIGHTS).unlink()
    change_json(directory / "config.json", weights_only=False, use_safetensors=False)
    for write in (
        lambda path: path.write_bytes(pickled(marker)),
        lambda path: write_torch_archive(path, marker),
    ):
        write(directory / name)
        assert "safetensors" in refusal(directory)
    assert not marker.exists()


@tries(*PICKLES)
def test_pickle_in_place_of_safetensors_is_refused(directory, marker):
    for content in (pickled(marker), b"\x80\x02" + pickled(marker)):
        (directory / WEIGHTS).write_bytes(content)
        assert "safetensors" in refusal(directory)
    write_torch_archive(directory / WEIGHTS, marker)
    assert "safetensors" in refusal(directory)
    assert not marker.exists()


@tries(*PICKLES)
def test_pickles_beside_the_weights_are_not_read(directory, marker):
    for name in (*FORMS_OF_WEIGHTS, *BESIDE):
        write_torch_archive(directory / name, marker)
    assert load_model(directory, device=torch.device("cpu"), dtype="float32").weight_bytes > 0
    assert TextModel.load(directory, name="model").encode_prompt("hello")
    assert not marker.exists()


@tries(*PICKLES)
def test_model_on_transformers_reads_no_pickle(tmp_path, marker):
    transformers_model(tmp_path)
    for name in (*FORMS_OF_WEIGHTS, *BESIDE):
        write_torch_archive(tmp_path / name, marker)
    assert load_model(tmp_path, device=torch.device("cpu")).weight_bytes > 0
    (tmp_path / WEIGHTS).unlink()
    assert "safetensors" in refusal(tmp_path)
    assert not marker.exists()


def test_pickles_of_these_tests_create_the_marker_when_read(tmp_path, marker):
    pickle.loads(pickled(marker))
    assert marker.exists()
    marker.rmdir()
    write_torch_archive(tmp_path / "model.pt", marker)
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert marker.exists()
