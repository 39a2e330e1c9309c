"""Invalid model directories: the child reports each in one clear frame and exits by itself."""

import json
import struct

import pytest
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SIZES, save
from fairlead.base import messages
from fairlead.engine.worker.main import _load, serve

WEIGHTS = "model.safetensors"


class RecordingParent:
    """A parent that requests one model and then only records the frames."""

    def __init__(self, path) -> None:
        self.frames: list[messages.ToParent] = []
        self._spec = messages.WorkerSpec(
            path=str(path), device="cpu", dtype="float32", listen=f"{path}/engine.sock"
        )

    def receive(self) -> messages.WorkerSpec:
        return self._spec

    def send(self, message: messages.ToParent) -> None:
        self.frames.append(message)


@pytest.fixture
def directory(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    return tmp_path


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1000])


def with_a_wrong_header_size(path):
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def with_wrong_offsets(path):
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"][1] += 2**40
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def with_a_wrong_shape(path):
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def without_a_tensor(path):
    tensors = load_file(path)
    del tensors["model.layers.2.self_attn.q_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def with_nan(path):
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def empty(path):
    path.write_bytes(b"")


def with_text(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        with_a_wrong_header_size,
        with_wrong_offsets,
        with_a_wrong_shape,
        without_a_tensor,
        with_nan,
        empty,
        with_text,
    ],
)
def test_invalid_weights_are_reported_in_one_frame_that_names_the_directory(damage, directory):
    damage(directory / WEIGHTS)
    parent = RecordingParent(directory)
    assert serve(parent, _load) == 1
    last = parent.frames[-1]
    assert isinstance(last, messages.LoadFailure)
    assert str(directory) in last.message
    assert len(last.message) < 1000
    assert all(isinstance(frame, messages.LoadProgress) for frame in parent.frames[:-1])
    assert not any(frame.fraction == 1 for frame in parent.frames[:-1])


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"hidden_size": 1 << 20}, "hidden_size"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rms_norm_eps": "NaN"}, "rms_norm_eps"),
        ({"auto_map": {"AutoModel": "evil.py--Model"}}, "auto_map"),
    ],
)
def test_invalid_config_is_reported_in_one_frame_that_names_the_key(values, key, directory):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    parent = RecordingParent(directory)
    assert serve(parent, _load) == 1
    last = parent.frames[-1]
    assert isinstance(last, messages.LoadFailure)
    assert str(directory) in last.message
    assert key in last.message
