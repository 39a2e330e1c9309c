# The interface of cext/cpustep.pyx; the docstrings are there.
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

from numpy.typing import NDArray
from typing_extensions import Buffer

_Array: TypeAlias = Buffer | NDArray[Any]

DTYPES: dict[str, int]

def variants(dtype: str) -> tuple[str, ...]: ...
def formats(dtype: str, variant: str | None = None) -> tuple[str, ...]: ...
def stored_formats(dtype: str, variant: str | None = None) -> tuple[str, ...]: ...
def choose(
    logits: _Array,
    temperatures: _Array,
    top_k: _Array,
    top_p: _Array,
    least: _Array,
    numbers: _Array,
    tokens: _Array,
    highest: _Array,
    *,
    greedy_below: float,
    threads: int = 1,
    variant: str | None = None,
    masks: _Array | None = None,
    mask_rows: _Array | None = None,
) -> None: ...
def read_rate(size: int, threads: int, tries: int = 3) -> float: ...

@final
class CpuModel:
    variant: str
    dtype: str
    threads: int

    def __new__(
        cls,
        *,
        dtype: str,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm_epsilon: float,
        ropes: Sequence[tuple[_Array, float]],
        windows: Sequence[int | None] = (None,),
        layer_groups: Sequence[int] | None = None,
        layer_ropes: Sequence[int] | None = None,
        tied: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        query_key_norm: bool = False,
        post_norms: bool = False,
        gelu: bool = False,
        embedding_scale: float = 1.0,
        attention_scale: float | None = None,
        attention_cap: float = 0.0,
        logit_cap: float = 0.0,
        threads: int = 1,
        max_batched_tokens: int = 512,
        variant: str | None = None,
        quantization: str | None = None,
        stored: Mapping[tuple[int | None, str], str] | None = None,
    ) -> CpuModel: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def work_bytes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def block_bytes(self, group: int) -> int: ...
    def missing(self) -> list[tuple[int | None, str]]: ...
    def rows(self, name: str) -> tuple[int, ...]: ...
    def pack(self, name: str, buffer: _Array, *, layer: int | None = None) -> None: ...
    def allocate_cache(self, blocks: Sequence[int]) -> None: ...
    def release(self, group: int, blocks: Sequence[int]) -> None: ...
    def run(
        self,
        input_ids: _Array,
        positions: _Array,
        slot_mapping: Sequence[_Array],
        query_starts: _Array,
        sequence_lengths: _Array,
        slots: _Array,
        block_tables: Sequence[_Array],
        sample_tokens: _Array,
        logits: _Array,
    ) -> None: ...
