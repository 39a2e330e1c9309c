"""Model directories that contain code or name code to run: none of it is run or fetched."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from advisories.directories import change_json, demonstration_copy, refusal, transformers_model
from advisories.tries import tries
from fairlead.base.errors import LoadFailed
from fairlead.engine.models.loader import load_model
from fairlead.language.text.model import TextModel
from language.text.fake_hub import COMMIT, FakeHub
from language.text.test_hub import find

REMOTE_CODE = (
    "CVE-2025-66448",  # vLLM
    "CVE-2026-22807",
    "CVE-2026-27893",
    "CVE-2026-90553",
    "CVE-2026-7669",  # SGLang
    "CVE-2026-46432",  # LMDeploy
    "CVE-2026-46517",
    "CVE-2026-5241",  # transformers
)
AUTO_MAPS = [
    {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    {"AutoConfig": "attacker/repository--evil.Evil"},
    {"AutoTokenizer": ["evil.Evil", None]},
    "evil.Evil",
    [],
]
KERNEL = "attacker/kernel"
# Hostile values where a model names an activation or a module.
CALLABLES = ["os.system", "torch.hub.load", "builtins.exec", "evil.Evil", "__import__"]
# Runs without assertions: tries hostile values, and prints a worker's error for each.
OPTIMIZED = """
import json, sys
from pathlib import Path
from advisories.directories import change_json, refusal
assert False, "python runs without -O"
path, said = Path(sys.argv[1]), []
config = path / "config.json"
original = config.read_text()
for values in json.loads(sys.argv[2]):
    change_json(config, **values)
    said.append(refusal(path))
    config.write_text(original)
print(json.dumps(said))
"""


@pytest.fixture
def directory(tmp_path, marker):
    """Return a model directory with Python modules that create the marker when they are imported."""
    directory = demonstration_copy(tmp_path / "model")
    code = f"import os\nos.mkdir({str(marker)!r})\nclass Evil: ...\n"
    for name in (
        "evil.py",
        "__init__.py",
        "configuration_llama.py",
        "modeling_llama.py",
        "tokenization_llama.py",
    ):
        (directory / name).write_text(code)
    return directory


@pytest.fixture
def no_network(monkeypatch):
    """Make each of the process's attempts to connect fail; return the list of these attempts."""
    requested = []

    def refuse(*arguments, **_):
        requested.append(arguments)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return requested


@tries(*REMOTE_CODE)
@pytest.mark.parametrize("auto_map", AUTO_MAPS, ids=str)
def test_model_that_needs_its_own_code_is_refused(directory, marker, no_network, auto_map):
    change_json(directory / "config.json", auto_map=auto_map, trust_remote_code=True)
    assert "auto_map" in refusal(directory)
    assert not marker.exists()
    assert no_network == []


@tries(*REMOTE_CODE)
@pytest.mark.parametrize("auto_map", AUTO_MAPS, ids=str)
def test_code_of_a_tokenizer_is_not_run(directory, marker, no_network, auto_map):
    values = {"auto_map": auto_map, "tokenizer_class": "Evil", "processor_class": "evil.Evil"}
    change_json(directory / "tokenizer_config.json", trust_remote_code=True, **values)
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        (directory / name).write_text(json.dumps(values))
    assert TextModel.load(directory, name="model").encode_prompt("hello")
    assert load_model(directory, device=torch.device("cpu")).weight_bytes > 0
    assert not marker.exists()
    assert no_network == []


@tries("CVE-2026-4372", *REMOTE_CODE)
@pytest.mark.parametrize(
    "values",
    [
        {"_attn_implementation_internal": KERNEL},
        {"_attn_implementation": KERNEL},
        {"attn_implementation": f"{KERNEL}:evil"},
        {"_experts_implementation_internal": KERNEL},
        {"experts_implementation": KERNEL},
        {"use_kernels": True, "trust_remote_code": True},
        {"_name_or_path": KERNEL, "base_model_name_or_path": KERNEL},
        {"custom_pipelines": {"text-generation": {"impl": "evil.Evil"}}},
    ],
    ids=str,
)
def test_transformers_fetches_no_kernel_or_code_that_a_model_names(tmp_path, no_network, values):
    transformers_model(tmp_path)
    change_json(tmp_path / "config.json", **values)
    with contextlib.suppress(LoadFailed):  # it may also refuse values that it cannot interpret
        model = load_model(tmp_path, device=torch.device("cpu")).model
        assert model._model.config._attn_implementation == "fairlead"
    assert no_network == []


@tries("CVE-2026-41523")
def test_no_callable_that_a_model_names_is_run_even_without_assertions(directory, marker, tmp_path):
    values = [{"hidden_act": name} for name in CALLABLES]
    values += [{"auto_map": AUTO_MAPS[0]}, {"architectures": [CALLABLES[0]]}]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMIZED, str(directory), json.dumps(values)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for value, printed in zip(values, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        assert next(iter(value)) in printed
    assert not marker.exists()


@tries("CVE-2026-41523")
@pytest.mark.parametrize("name", CALLABLES)
def test_module_that_a_model_names_is_not_imported(directory, marker, name):
    modules = [{"idx": 0, "type": f"{name}.Transformer", "path": ""}, {"idx": 1, "type": name, "path": "1"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    assert "modules.json" in refusal(directory)
    assert not marker.exists()


@tries("CVE-2026-9856")
def test_name_of_a_chat_template_is_not_used_as_a_path(directory, tmp_path):
    names = ["../../escaped", str(tmp_path / "escaped"), "..\\escaped", "default"]
    templates = [{"name": name, "template": "{{ messages[0].content }}"} for name in names]
    change_json(directory / "tokenizer_config.json", chat_template=templates)
    before = sorted(tmp_path.rglob("*"))
    model = TextModel.load(directory, name="model")
    assert model.encode_chat([{"role": "user", "content": "hello"}])
    assert sorted(tmp_path.rglob("*")) == before


@tries("CVE-2026-47155", "GHSA-hhv2-872h-628q")
def test_every_file_of_a_model_comes_from_the_requested_revision(tmp_path):
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"a",
        "model.safetensors": b"b",
    }
    with FakeHub({"org/model": files}) as hub:
        outcome, path, _ = find(f"org/model@{COMMIT}", hub, tmp_path)
    assert (outcome, Path(path).name) == ("found", COMMIT)
    assert len(hub.requests) >= len(files)
    assert all(f"/{COMMIT}" in path for _, path, _ in hub.requests), hub.requests


@tries(*REMOTE_CODE, "CVE-2025-24357")
def test_no_code_and_no_pickle_is_fetched(tmp_path):
    allowed = {"config.json": b"{}", "model.safetensors": b"b"}
    refused = [
        "evil.py",
        "tokenizer.py",
        "tokenizer/evil.py",
        "pytorch_model.bin",
        "tokenizer.bin",
        "model.pt",
        "a.pkl",
    ]
    with FakeHub({"org/model": allowed | dict.fromkeys(refused, b"evil")}) as hub:
        outcome, path, _ = find("org/model", hub, tmp_path)
    assert outcome == "found"
    assert sorted(file.name for file in Path(path).iterdir()) == sorted(allowed)
    assert not any(requested.split("?")[0].endswith(tuple(refused)) for _, requested, _ in hub.requests)
