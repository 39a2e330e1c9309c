"""`find_model` finds models by their names on a hub, here a `FakeHub` on the loopback interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.base.errors import LoadFailed
from fairlead.language.text.hub import find_model
from language.text.fake_hub import COMMIT, FakeHub

WEIGHTS = bytes(1_000_000)
FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"evil",
    "consolidated.00.safetensors": WEIGHTS,
    "original/model.safetensors": WEIGHTS,
    "README.md": b"#",
}
FETCHED = ["1_Pooling/config.json", "chat_template.jinja", "config.json", "merges.txt", "model.safetensors"]
FETCHED.append("tokenizer.json")
GGUF = ["small.Q4_K_M.gguf", "mmproj-small.gguf", "README.md"]
GGUF += ["small-Q8_0-00001-of-00002.gguf", "small-Q8_0-00002-of-00002.gguf", "BF16/small-BF16.gguf"]
SCRIPT = """
import json, sys
from fairlead.base.errors import LoadFailed
from fairlead.language.text.hub import find_model
for name in sys.argv[1:]:
    progress = []
    try:
        print(json.dumps(["found", str(find_model(name, progress.append)), progress]))
    except LoadFailed as error:
        print(json.dumps(["failed", error.message, progress]))
assert "torch" not in sys.modules
"""


@pytest.fixture
def hub():
    with FakeHub(
        {
            "org/model": dict(FILES),
            "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
            "org/small-GGUF": dict.fromkeys(GGUF, b"x"),
            "org/odd-GGUF": dict.fromkeys(["odd-Q2_K.gguf", "odd-Q8_0.gguf"], b"x"),
        }
    ) as hub:
        yield hub


def find(name, hub, cache, **environment):
    """Find the model in a new process: the library reads its environment only once."""
    [found] = find_each([name], hub, cache, **environment)
    return found


def find_each(names, hub, cache, script=SCRIPT, **environment):
    """Find several models in one new process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    variables |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", script, *names],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()[-len(names) :]]


def test_hub_model_is_downloaded_once_with_only_the_files_that_are_read(hub, tmp_path):
    outcome, path, progress = find("org/model", hub, tmp_path)
    assert outcome == "found"
    files = {
        str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()
    }
    assert {name: FILES[name] for name in FETCHED} == files
    assert progress == sorted(progress)
    assert progress[-1] == 1
    assert len(progress) > 2
    assert path.startswith(str(tmp_path))
    hub.requests.clear()
    assert find("org/model", hub, tmp_path)[:2] == ["found", path]
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_one_gguf_of_a_repository_is_downloaded_with_all_its_parts(hub, tmp_path):
    names = [
        "org/small-GGUF",
        "org/small-GGUF:q8_0",
        "org/small-GGUF:BF16",
        "org/odd-GGUF:odd-Q2_K.gguf@main",
    ]
    found = find_each(names, hub, tmp_path)
    paths = [Path(path) for outcome, path, _ in found if outcome == "found"]
    expected = ["small.Q4_K_M.gguf", "small-Q8_0-00001-of-00002.gguf", "small-BF16.gguf", "odd-Q2_K.gguf"]
    assert [path.name for path in paths] == expected
    assert paths[1].with_name("small-Q8_0-00002-of-00002.gguf").read_bytes() == b"x"
    assert not list(tmp_path.rglob("mmproj*")) + list(tmp_path.rglob("odd-Q8_0*"))
    hub.requests.clear()
    offline = find_each(names, hub, tmp_path, HF_HUB_OFFLINE="1")
    assert [path for _, path, _ in offline] == list(map(str, paths))
    assert not hub.requests


def test_file_and_folder_with_one_gguf_are_found(tmp_path):
    file = tmp_path / "a.Q4_K_M.gguf"
    file.touch()
    (tmp_path / "mmproj-a.gguf").touch()
    assert find_model(file) == find_model(tmp_path) == file
    (tmp_path / "b.Q4_K_M.gguf").touch()
    with pytest.raises(LoadFailed, match=r"there are: a\.Q4_K_M\.gguf, b\.Q4_K_M\.gguf"):
        find_model(tmp_path)
    with pytest.raises(LoadFailed, match="no such directory or file"):
        find_model(tmp_path / "absent.gguf")


def test_offline_only_downloaded_models_are_found(hub, tmp_path):
    _, path, _ = find("org/model", hub, tmp_path)
    hub.requests.clear()
    found, (outcome, message, _) = find_each(["org/model", "org/other"], hub, tmp_path, HF_HUB_OFFLINE="1")
    assert found[:2] == ["found", path]
    assert outcome == "failed"
    assert message.startswith("org/other: not in the cache")
    assert not hub.requests


def test_downloaded_model_is_found_without_a_request(hub, tmp_path):
    script = """if True:
        import json, sys
        from fairlead.language.text.hub import find_local
        for name in sys.argv[1:]:
            found = find_local(name)
            print(json.dumps(found and str(found)))
    """
    assert find_each(["org/model"], hub, tmp_path, script) == [None]
    _, path, _ = find("org/model", hub, tmp_path)
    hub.requests.clear()
    assert find_each(["org/model", path, "no name of a model"], hub, tmp_path, script) == [path, path, None]
    assert not hub.requests


def test_unreachable_hub_is_reported_as_the_reason(hub, tmp_path):
    outcome, message, _ = find("org/model", hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert outcome == "failed"
    assert "org/model: not in the cache, and the hub cannot be reached" in message


def test_private_model_needs_a_token(hub, tmp_path):
    hub.private.add("org/model")
    outcome, message, _ = find("org/model", hub, tmp_path)
    assert outcome == "failed"
    assert "HF_TOKEN" in message
    assert find("org/model", hub, tmp_path, HF_TOKEN="secret")[0] == "found"
    assert "Bearer secret" in {authorization for *_, authorization in hub.requests}


def test_errors_name_what_the_hub_lacks(hub, tmp_path):
    reasons = {
        "org/nothing": "no such model on the hub",
        "org/pickled": "no weights as safetensors",
        "org/odd-GGUF": "without a name after a colon, and none or several are Q4_K_M",
        "org/small-GGUF:Q9": "named 'Q9'; there are: BF16/small-BF16.gguf, small-Q8_0",
        "org/model@v9": "no revision 'v9'",
    }
    for (name, reason), (outcome, message, _) in zip(
        reasons.items(), find_each(reasons, hub, tmp_path), strict=True
    ):
        assert outcome == "failed"
        assert reason in message
        assert message.startswith(name.split("@")[0].split(":")[0])


def test_error_for_a_gated_model_names_the_missing_access(hub, tmp_path):
    hub.gated.add("org/model")
    outcome, message, _ = find("org/model", hub, tmp_path, HF_TOKEN="secret")
    assert (outcome, "grant access" in message) == ("failed", True)


def test_revision_can_be_given_in_the_name(hub, tmp_path):
    outcome, path, _ = find(f"org/model@{COMMIT}", hub, tmp_path)
    assert (outcome, Path(path).name) == ("found", COMMIT)


def test_failed_download_is_reported_and_retried_by_the_next_call(hub, tmp_path):
    hub.broken.add("model.safetensors")
    outcome, message, _ = find("org/model", hub, tmp_path)
    assert outcome == "failed"
    assert "org/model: cannot be downloaded from the hub" in message
    hub.broken.clear()
    outcome, path, _ = find("org/model", hub, tmp_path)
    assert (outcome, Path(path, "model.safetensors").read_bytes()) == ("found", WEIGHTS)


def test_existing_directory_is_returned(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "org" / "model" == find_model("org/model")
    assert tmp_path == find_model(tmp_path)


def test_directory_with_safetensors_and_gguf_is_found(tmp_path):
    (tmp_path / "small.gguf").touch()
    (tmp_path / "model.safetensors").touch()
    assert find_model(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "name", ["", "model", "/no/where", "a/b/c", "../x/y", "org/model@", "org/mo del", "-o/x"]
)
def test_path_that_is_neither_a_directory_nor_a_hub_name_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert tmp_path == find_model(name)  # the current directory
        return
    with pytest.raises(LoadFailed, match="no such directory"):
        find_model(name)
