"""Safetensors files: which headers are accepted, and which are refused."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_bytes
from safetensors.torch import save

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.tensor_file import TensorFile

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7, dtype=torch.float16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "whole": torch.arange(3, dtype=torch.int64),
}
VALID_FILE = save(TENSORS, metadata={"format": "pt"})


def write_file(path, header, size, *, data=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + (bytes(size) if data is None else data))
    return path


def entry(begin=0, end=8, shape=(2,), dtype="F32", **other):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **other}


def failure(path):
    with pytest.raises(LoadFailed) as caught:
        TensorFile(path)
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("size", [1, 8, 10**6])
def test_saved_tensors_are_read_in_pieces_of_any_size(tmp_path, size):
    (tmp_path / "file").write_bytes(VALID_FILE)
    tensors = TensorFile(tmp_path / "file").tensors
    assert set(TENSORS) == set(tensors)
    for name in ("a", "b", "empty", "scalar"):
        pieces = list(tensors[name].pieces(size))
        found = torch.cat(pieces) if pieces else torch.empty(0, dtype=TENSORS[name].dtype)
        assert torch.equal(TENSORS[name], found.view(TENSORS[name].shape))
        assert torch.equal(TENSORS[name], tensors[name].mapped())


def test_header_of_any_length_gives_the_same_tensors(tmp_path):
    data = torch.arange(2, dtype=torch.float32)
    header = json.dumps({"a": entry()}).encode()
    for padding in range(8):
        path = write_file(tmp_path / "file", header + b" " * padding, 0, data=data.numpy().tobytes())
        assert torch.equal(data, torch.cat(list(TensorFile(path).tensors["a"].pieces(100))))


def test_integer_tensors_are_listed_but_refused_as_weights(tmp_path):
    (tmp_path / "file").write_bytes(VALID_FILE)
    whole = TensorFile(tmp_path / "file").tensors["whole"]
    with pytest.raises(LoadFailed, match="'whole' is of I64"):
        whole.mapped()


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ({"a": entry(), "b": entry(4, 12)}, 12, "overlaps another"),
        ({"a": entry(), "b": entry()}, 8, "overlaps another"),
        ({"a": entry(4, 12)}, 12, "gap"),
        ({"a": entry(), "b": entry(16, 24)}, 24, "gap"),
        ({"a": entry()}, 9, "1 bytes at its end"),
        ({}, 100, "100 bytes at its end"),
        ({"a": entry()}, 7, "truncated"),
        ({"a": entry(-8, 0)}, 8, "truncated"),
        ({"a": entry(8, 0)}, 8, "truncated"),
        ({"a": entry(0, 1 << 62, (1 << 60,))}, 8, "truncated"),
        ({"a": entry(shape=(3,))}, 8, "cannot take 8 bytes"),
        ({"a": entry(shape=(1 << 62, 1 << 62))}, 8, "cannot take 8 bytes"),
        ({"a": entry(shape=(-1, -2))}, 8, "shape"),
        ({"a": entry(shape=(True, 2))}, 8, "shape"),
        ({"a": entry(shape=(2.0,))}, 8, "shape"),
        ({"a": entry(shape=[1] * 100)}, 8, "shape"),
        ({"a": entry(dtype="F33")}, 8, "'F33', which is not known"),
        ({"a": entry(dtype=None)}, 8, "lacks dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "lacks dtype"),
        ({"a": entry() | {"data_offsets": [0, 4, 8]}}, 8, "lacks dtype"),
        ({"a": entry() | {"data_offsets": [0, 8.0]}}, 8, "lacks dtype"),
        ({"a": entry() | {"shape": "2"}}, 8, "lacks dtype"),
        ({"a": [1]}, 8, "lacks dtype"),
        ([], 8, "not a JSON object"),
        (b"{", 8, "not valid JSON"),
        (b"\xff\xfe{}", 8, "not valid JSON"),
        (b"[" * 200_000, 8, "not valid JSON"),
        (b'{"a":' + b"1" * 5000 + b"}", 8, "not valid JSON"),
        (b"", 8, "not valid JSON"),
        (
            b'{"a": %(entry)s, "a": %(entry)s}' % {b"entry": json.dumps(entry()).encode()},
            8,
            "'a' twice",
        ),
    ],
)
def test_invalid_header_is_refused_with_the_file_name(tmp_path, header, size, reason):
    assert reason in failure(write_file(tmp_path / "invalid", header, size))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, len(VALID_FILE), len(VALID_FILE) - 7])
def test_header_length_beyond_the_file_is_refused(tmp_path, length):
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", length) + VALID_FILE[8:])
    assert "header of" in failure(path)


@pytest.mark.parametrize("size", range(0, len(VALID_FILE), 7))
def test_file_cut_short_anywhere_is_refused(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(VALID_FILE[:size])
    failure(path)


def test_path_that_is_not_a_regular_file_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    assert "not a file" in failure(tmp_path / "pipe")
    assert "not a file" in failure(tmp_path / "directory")
    assert "No such file" in failure(tmp_path / "nothing")
    failure(tmp_path / ("x" * 300))


def test_symbolic_link_to_a_file_is_accepted(tmp_path):
    (tmp_path / "blob").write_bytes(VALID_FILE)
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert set(TENSORS) == set(TensorFile(tmp_path / "link").tensors)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(VALID_FILE) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_damaged_file_is_read_as_the_format_defines_or_refused(tmp_path, changes):
    damaged = bytearray(VALID_FILE)
    for offset, value in changes:
        damaged[offset] = value
    path = tmp_path / "file"
    path.write_bytes(damaged)
    try:
        tensors = TensorFile(path).tensors
    except LoadFailed as error:
        assert str(path) in error.message  # noqa: PT017  either outcome is right
        return
    # Any file that we accept is read identically by the safetensors library.
    expected = load_bytes(bytes(damaged))
    assert set(expected) == set(tensors)
    for name, tensor in tensors.items():
        assert tuple(expected[name].shape) == tensor.shape
        if tensor.dtype in {"F64", "F32", "F16", "BF16"}:
            tensor_bytes = [
                one.contiguous().view(-1).view(torch.uint8) for one in (expected[name], tensor.mapped())
            ]
            assert not tensor.nbytes or torch.equal(*tensor_bytes)


def test_pages_are_released_after_reading(tmp_path):
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        header = json.dumps({"a": entry(0, size, (size // 4,))}).encode()
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    tensor = TensorFile(tmp_path / "large").tensors["a"]
    assert sum(float(piece.sum()) for piece in tensor.pieces(4 << 20)) == 0
    assert resident_bytes(tmp_path / "large") < size // 4
    assert size == sum(tensor.read_ahead(4 << 20))
    assert resident_bytes(tmp_path / "large") > size // 2
    tensor.drop_pages()
    assert resident_bytes(tmp_path / "large") < size // 4


def resident_bytes(path):
    """Return the resident bytes of a mapped file; those of the whole process would include other garbage."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024
        for line in lines
        if line.endswith(str(path))
    )
