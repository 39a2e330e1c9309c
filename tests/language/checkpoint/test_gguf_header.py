"""Headers of GGUF files: what is wrong is refused by name, and costs no memory."""

import os
import re
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.base.errors import LoadFailed
from fairlead.engine.cpu_step import CpuStep
from fairlead.engine.models.checkpoint_tensors import CheckpointTensors
from fairlead.language.checkpoint.folder import read_folder
from fairlead.language.checkpoint.gguf.checkpoint import GgufCheckpoint
from fairlead.language.checkpoint.gguf.header import TYPES, read_header
from language.checkpoint.gguf_files import blocks, write

LLAMA = {
    "general.alignment": 32,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.add_bos_token": False,
}
SHAPES = {
    "token_embd.weight": (3, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (32, 32),
    "blk.0.ffn_up.weight": (32, 32),
    "blk.0.ffn_down.weight": (32, 32),
}


def tensors(kind="Q4_0"):
    rng = np.random.default_rng(0)
    return {
        name: (blocks("F32" if len(shape) == 1 else kind, shape, rng), "F32" if len(shape) == 1 else kind)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("file") / "a.gguf", "llama", LLAMA, tensors())
    return path.read_bytes()


def refusal(path):
    """Return why a file is refused, as the parent reads it before it starts a process for it."""
    with pytest.raises(LoadFailed) as raised:
        read_folder(path)
    return str(raised.value)


def test_metadata_and_tensors_are_those_of_the_file(content, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    header = read_header(path)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"].values() == ["a", "b", "ab"]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert {tensor.name: tensor.shape for tensor in header.tensors} == SHAPES
    assert read_folder(path).spec.hidden_size == 32


def test_each_lie_is_named(content, tmp_path):
    def with_number(after, number, size=8, skip=0):
        at = content.index(after) + len(after) + skip
        return content[:at] + number.to_bytes(size, "little") + content[at + size :]

    tokens, q = b"tokenizer.ggml.tokens", b"blk.0.attn_q.weight"
    lies = {
        "version 9 of GGUF": with_number(b"GGUF", 9, 4),
        "other order of bytes": content[:4] + content[4:8][::-1] + content[8:],
        "18446744073709551615 tensors": with_number(b"GGUF", 2**64 - 1, skip=4),
        "list of 100000 tensors": with_number(b"GGUF", 100_000, skip=4),
        "keys": with_number(b"GGUF", 2**40, skip=12),
        "general.alignment: must be a power of two": with_number(b"general.alignment", 33, 4, 4),
        "has the key|is missing|not UTF-8": content.replace(b"llama.block_count", b"llama.block_coun\xff"),
        "type 77": with_number(tokens, 77, 4),
        "array of the type 9": with_number(tokens, 9, 4, 4),
        "8388609 items": with_number(tokens, 8_388_609, skip=8),
        "item 0 is too long": with_number(tokens, 2**63, skip=16),
        "boolean with the value 2": with_number(b"add_bos_token", 2, 1, 4),
        "has 9 dimensions": with_number(q, 9, 4),
        "no whole blocks of 32": with_number(q, 31, skip=4),
        "reaches beyond the end": with_number(q, 2**62, skip=12),
        "of IQ2_XXS, which is not supported": with_number(q, 16, 4, 20),
        "the unknown type 99": with_number(q, 99, 4, 20),
        "not aligned to 32": with_number(q, 33, skip=24),
        "overlaps another": with_number(q, 0, skip=24),
        "tensor 'blk.0.attn_k.weight'.* twice": content.replace(q, b"blk.0.attn_k.weight"),
        "is not one of this family's": content.replace(q, b"blk.0.attn_z.weight"),
        "architecture: 'llamb' is not supported": content.replace(b"llama", b"llamb", 2),
        "llama.block_c.unt: is not known": content.replace(b"llama.block_count", b"llama.block_cxunt"),
    }
    path = tmp_path / "a.gguf"
    for reason, lie in lies.items():
        path.write_bytes(lie)
        message = refusal(path)
        assert message.startswith(str(path))
        assert re.search(reason, message), (reason, message)


@pytest.mark.parametrize("length", [0, 3, 4, 20, 24, 100, 400, -1, -2000])
def test_truncated_file_is_refused(content, tmp_path, length):
    path = tmp_path / "a.gguf"
    path.write_bytes(content[:length])
    assert str(path) in refusal(path)


def test_missing_file_pipe_and_directory_of_that_name_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("absent.gguf", "pipe.gguf", "folder.gguf"):
        assert name in refusal(tmp_path / name)


def parts(
    tmp_path, content_of=lambda number: {"split.no": number, "split.count": 3, "split.tensors.count": 11}
):
    """Write a model in three files; `content_of`: what each says of the parts."""
    every = list(tensors().items())
    for number in range(3):
        metadata = content_of(number) | (LLAMA if number == 0 else {})
        path = tmp_path / f"m-{number + 1:05}-of-00003.gguf"
        write(path, "llama", metadata, dict(every[number * 4 : number * 4 + 4]))
    return tmp_path / "m-00001-of-00003.gguf"


def test_parts_of_a_model_are_read_as_one(tmp_path):
    path = parts(tmp_path)
    assert len(GgufCheckpoint(path).tensors().tensors) == 11
    assert read_folder(path).spec.layers == 1


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    path = parts(tmp_path)
    assert "is not the first part" in refusal(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "other.gguf")
    assert "m-00003-of-00003.gguf: is missing, of 3 parts" in refusal(path)
    (tmp_path / "m-00003-of-00003.gguf").symlink_to(tmp_path / "m-00002-of-00003.gguf")
    assert "split.no: (3, 1) in part 2 of 3" in refusal(path)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    (tmp_path / "m-00003-of-00003.gguf").symlink_to(tmp_path / "m-00003-of-00003.gguf")  # to itself
    assert "is missing" in refusal(path)


def test_parts_that_lie_about_their_tensors_are_refused(tmp_path):
    lie = lambda number: {"split.no": number, "split.count": 3, "split.tensors.count": 99}  # noqa: E731
    assert "99, but the files have 11 tensors" in refusal(parts(tmp_path, lie))


def test_changed_file_is_read_again(content, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert read_folder(path).max_model_len == 64
    write(path, "llama", LLAMA | {"llama.context_length": 128}, tensors())
    assert read_folder(path).max_model_len == 128


def mutated(content, draw):
    """Return the file with some of its bytes changed, moved, or gone."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 2600) - 1)) if data else 0
        match draw(st.sampled_from(["byte", "number", "small", "cut", "double", "drop", "zero"])):
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                number = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
                data[at : at + 8] = number.to_bytes(8, "little")
            case "small":
                data[at : at + 4] = draw(st.integers(0, 64)).to_bytes(4, "little")
            case "cut":
                del data[draw(st.integers(0, len(data))) :]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "drop":
                del data[at : at + draw(st.integers(1, 64))]
            case "zero":
                data[at : at + 16] = bytes(16)
    return bytes(data)


def check_one_mutant(content, path, data):
    """A changed file is a model, or refused by name; memory is that of the file, whatever it says."""
    changed = mutated(content, data.draw)
    path.write_bytes(changed)
    tracemalloc.reset_peak()
    before, reason = tracemalloc.get_traced_memory()[0], None
    try:
        folder = read_folder(path)
        if (document := folder.checkpoint.document("tokenizer.json")).is_file():
            document.read_bytes()
        listing = folder.checkpoint.tensors()
        for tensor in listing.tensors.values():
            if folder.spec.vocab_size < 100:
                tensor.array()
        with CheckpointTensors(folder.checkpoint, dtype="float32") as weights:
            step = CpuStep.load(folder.spec, weights, threads=1, max_batched_tokens=16)
        assert step.model.weight_bytes < 40 * len(content)
    except LoadFailed as error:
        reason = str(error)
    assert reason is None or str(path) in reason
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < 40 * len(content) + 2_000_000


@pytest.fixture(scope="module")
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.fuzz
@pytest.mark.usefixtures("traced")
def test_mutated_files_are_refused_by_name(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("mutants") / "a.gguf"

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def check(data):
        check_one_mutant(content, path, data)

    check()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("traced")
def test_ten_thousand_mutated_files_are_refused_by_name(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("mutants") / "a.gguf"

    @settings(max_examples=10_000, deadline=None)
    @given(st.data())
    def check(data):
        check_one_mutant(content, path, data)

    check()


def test_types_have_the_sizes_of_the_library():
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.elements, kind.nbytes)
