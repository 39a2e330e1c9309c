"""The formats that linear layers keep weights in: rules of all, and what a new one and a stored one need."""

import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
import transformers
from safetensors.torch import load_file, save_file

from engine.models.test_int8 import recorded, relative_errors
from engine.models.tiny import SIZES, save
from engine.test_cpu_step import CONFIGS, relative_error
from fairlead.base.errors import LoadFailed
from fairlead.engine.cpu_step import CpuStep
from fairlead.engine.forward import TorchForward
from fairlead.engine.models.quantization import FORMATS
from fairlead.engine.models.quantization.int4 import Int4, Int4Linear
from fairlead.engine.models.quantization.int8 import Int8Linear
from fairlead.engine.models.quantization.none import UnquantizedLinear
from fairlead.engine.models.weights import Weights
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.tensor_file import StoredTensor, TensorFile

CPU = torch.device("cpu")
CODEBOOK = torch.tensor(
    [-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1]
)


class Codebook:
    """A made-up `WeightFormat`: codes of 4 bits in groups of 8, a scale for each group, and uneven steps."""

    name: ClassVar[str | None] = "codebook"

    def refusal(self, device, _dtype):
        return None if device.type == "cpu" else "needs a CPU"

    def suits(self, _outputs, inputs):
        return inputs % 8 == 0

    def pack(self, rows):
        groups = rows.float().view(len(rows), -1, 8)
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        codes = ((groups / scales)[..., None] - CODEBOOK).abs().argmin(-1).to(torch.uint8)
        return codes[..., ::2] << 4 | codes[..., 1::2], scales

    def unpack(self, packed, inputs):
        codes, scales = packed
        both = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).long()
        return (CODEBOOK[both] * scales).view(-1, inputs)

    def linear(self, packed, inputs, bias):
        return CodebookLinear(self, packed, inputs, bias)


class CodebookLinear:
    def __init__(self, form, packed, inputs, bias):
        self.form, self.packed, self.bias = form, packed, bias
        self.in_features, self.out_features = inputs, len(packed[0])
        self.nbytes = sum(part.nbytes for part in packed)

    def __call__(self, x):
        return F.linear(x, self.form.unpack(self.packed, self.in_features).to(x.dtype), self.bias)


NARROW = [each for each in (*FORMATS.values(), Codebook()) if each.name is not None]
NARROW_IDS = [each.name for each in NARROW]


@pytest.mark.parametrize("form", NARROW, ids=NARROW_IDS)
def test_rows_packed_in_pieces_and_stacked_equal_rows_packed_at_once(form):
    weight = torch.randn(48, 64) * torch.logspace(-3, 1, 48)[:, None]
    whole = form.pack(weight)
    pieces = [form.pack(piece) for piece in weight.split((1, 30, 17))]
    for part, *stacked in zip(whole, *pieces, strict=True):
        assert torch.equal(part.view(torch.uint8), torch.cat(stacked).view(torch.uint8))


@pytest.mark.parametrize("form", NARROW, ids=NARROW_IDS)
def test_layer_multiplies_by_the_unpacked_weight_in_less_memory(form):
    torch.manual_seed(1)
    weight, x, bias = (torch.randn(*size).bfloat16() for size in ((96, 64), (5, 64), (96,)))
    weight[7] = 0
    packed = form.pack(weight)
    restored = form.unpack(packed, 64)
    assert 0.002 < (restored - weight.float()).norm() / weight.float().norm() < 0.12
    layer = form.linear(packed, 64, bias)
    expected = x.float() @ restored.T + bias.float()
    assert relative_error(layer(x).float(), expected) < (0.04 if form.name == "fp8" else 0.01)
    assert [layer.out_features, layer.in_features] == [96, 64]
    assert layer.nbytes < 0.6 * weight.nbytes


def test_new_format_needs_its_class_and_its_entry_only(tmp_path, monkeypatch):
    """The C kernel does not read it, so torch runs the model; its logits are those of the rounded weights."""
    monkeypatch.setitem(FORMATS, "codebook", Codebook())
    save(transformers.LlamaConfig(**SIZES), tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    actual, forward = recorded(tmp_path / "model", quantization="codebook")
    assert type(forward) is TorchForward
    assert type(forward.model.layers[0].attention.qkv) is CodebookLinear
    assert type(forward.model.head) is UnquantizedLinear
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = Codebook().unpack(Codebook().pack(tensor), tensor.shape[1])
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    expected, _ = recorded(tmp_path / "model", compiled=False)
    assert relative_error(actual, expected) <= 1e-4


def test_format_leaves_weights_alone_that_do_not_suit_it(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "codebook", Codebook())
    save(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 84}), tmp_path)
    _, forward = recorded(tmp_path, quantization="codebook")
    assert type(forward.model.layers[0].mlp.down) is UnquantizedLinear
    assert type(forward.model.layers[0].mlp.gate_up) is CodebookLinear


class StoredRows(StoredTensor, frozen=True):
    """A tensor that a made-up checkpoint stores in a format: rows that are packed already."""

    form: str
    parts: tuple[torch.Tensor, ...]

    def rows(self, rows):
        part = tuple(each[rows.start : rows.stop] for each in self.parts)
        return StoredRows(
            self.file, self.name, "", (len(rows), self.shape[1]), 0, size_of(part), self.form, part
        )

    def packed_pieces(self, columns, size_bytes):
        step = max(1, size_bytes * self.shape[0] // self.nbytes)
        yield from zip(*(part.split(step) for part in self.parts), strict=True)


def size_of(parts):
    return sum(part.nbytes for part in parts)


def stored(name, form, rows, file):
    parts = FORMATS[form].pack(rows)
    return StoredRows(file, name, "", tuple(rows.shape), 0, size_of(parts), form, parts)


@pytest.fixture
def weights_of(tmp_path):
    """Return a function that makes `Weights` of matrices, each stored in the format of this name."""

    def make(quantization=None, **forms):
        torch.manual_seed(2)
        rows = {name: torch.randn(size, 64) for name, size in zip(forms, (96, 32, 40), strict=False)}
        save_file({f"{name}.weight": each for name, each in rows.items()}, tmp_path / "model.safetensors")
        file = TensorFile(tmp_path / "model.safetensors")
        options = {"dtype": torch.float32, "device": CPU, "quantization": FORMATS[quantization]}
        weights = Weights(open_checkpoint(tmp_path), **options)
        for name, form in forms.items():
            if form is not None:
                weights._tensors[f"{name}.weight"] = stored(f"{name}.weight", form, rows[name], file)
        return weights, rows, {name: len(each) for name, each in rows.items()}

    return make


@pytest.mark.parametrize(("form", "bytes_a_weight"), [("int8", 1 + 4 / 64), ("int4", 5 / 8)])
def test_rows_that_are_stored_narrow_are_stacked_narrow(weights_of, form, bytes_a_weight):
    weights, rows, sizes = weights_of(q=form, k=form, v=form)
    layer = weights.linear(sizes, 64, quantized=False)
    stacked = FORMATS[form].pack(torch.cat(list(rows.values())))
    expected = FORMATS[form].linear(stacked, 64, None)
    x = torch.randn(3, 64)
    assert torch.equal(expected(x), layer(x))
    assert layer.nbytes == weights.bytes_placed == math.prod((168, 64)) * bytes_a_weight
    assert weights.bytes_read == layer.nbytes


def test_narrow_rows_are_never_expanded_while_they_are_stacked(weights_of, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: made.append(empty(*size, **kind)) or made[-1])
    weights, _, sizes = weights_of(q="int8", k="int8", v="int8")
    made.clear()
    assert type(weights.linear(sizes, 64)) is Int8Linear
    assert {torch.int8: 168 * 64, torch.float32: 168} == {each.dtype: each.numel() for each in made}


def test_rows_in_several_formats_are_not_fused(weights_of):
    weights, _, sizes = weights_of(q="int8", k="int4", v=None)
    with pytest.raises(LoadFailed, match=r"'q.weight' is stored in a format of its own"):
        weights.linear(sizes, 64)


def test_rows_are_rounded_piece_by_piece_and_never_expanded(weights_of, monkeypatch):
    weights, rows, sizes = weights_of("int4", q=None, k=None, v=None)
    monkeypatch.setattr("fairlead.engine.models.checkpoint_tensors._PIECE_BYTES", 2048)
    packed_at_once = []
    pack = Int4.pack
    monkeypatch.setattr(Int4, "pack", lambda self, rows: packed_at_once.append(len(rows)) or pack(self, rows))
    layer = weights.linear(sizes, 64)
    assert max(packed_at_once) <= 8
    assert sum(packed_at_once) == 168
    expected = Int4().linear(Int4().pack(torch.cat(list(rows.values()))), 64, None)
    x = torch.randn(3, 64)
    assert torch.equal(expected(x), layer(x))


@pytest.fixture(scope="module", params=["llama", "llama, biases, yarn", "gemma3"])
def directory(request, tmp_path_factory):
    """A model with its embedding and head rounded to int4 in advance, because torch does not round them."""
    path = tmp_path_factory.mktemp("model")
    save(CONFIGS[request.param], path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
        tensors[name] = Int4().unpack(Int4().pack(tensors[name]), tensors[name].shape[1]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_compiled_int4_logits_match_torch_on_the_same_codes(directory):
    expected, plain = recorded(directory, quantization="int4", compiled=False)
    actual, forward = recorded(directory, quantization="int4")
    assert (TorchForward, CpuStep) == (type(plain), type(forward))
    assert type(plain.model.layers[0].attention.qkv) is Int4Linear
    assert relative_error(actual, expected) <= 1e-4


def test_int4_costs_more_than_int8_and_stays_near_float32(tmp_path):
    config = transformers.LlamaConfig(**{**SIZES, "initializer_range": 0.05})
    save(config, tmp_path)
    int8, int4 = relative_errors(tmp_path, {"quantization": "int8"}, {"quantization": "int4"})
    assert int8 < int4 < 0.3
