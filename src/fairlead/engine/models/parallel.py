"""Tensor parallelism: how a network is divided among processes, and what they exchange while computing it.

Each of the processes, called ranks, has a part of every matrix, and its part of the KV cache. The first
matrix of attention and of an MLP is cut by rows (its outputs), the second by columns (its inputs), so that a
layer needs two sums over all ranks. The vocabulary is cut, too: embeddings of tokens are summed, and logits
are gathered by rank 0. Everything else, which is small, is in each rank: norms, routers, the biases of sums.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.engine.models.linear import Linear
from fairlead.language.checkpoint.architecture import ArchitectureSpec


class Work(Protocol):
    """An operation of a `ProcessGroup`."""

    def wait(self) -> object: ...


class ProcessGroup(Protocol):
    """What is used of a process group of `torch.distributed`, which computes in place.

    Rank 0 is the one that others receive from or send to. Operations must be started in the same order by all
    ranks. On a GPU `wait` waits in the current stream only.
    """

    def allreduce(self, tensors: list[Tensor], /) -> Work: ...
    def broadcast(self, tensors: list[Tensor], /) -> Work: ...
    def gather(self, received: list[list[Tensor]], tensors: list[Tensor], /) -> Work: ...


class Ranks:
    """The processes that compute one model, seen by one of them: number `rank` of `size`.

    With more than one, `join` must be called before anything is exchanged.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self._group: ProcessGroup | None = None

    def join(self, group: ProcessGroup) -> None:
        """Exchange through this group from now on."""
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, in its memory; every rank gets the same bits."""
        if self.size > 1:
            assert self._group is not None
            self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """Return on rank 0 the parts of all ranks side by side, [T, columns]; on others something else.

        Each rank has its `share` of the columns.
        """
        if self.size == 1:
            return x
        assert self._group is not None
        shares = [len(share(columns, rank, self.size)) for rank in range(self.size)]
        widest = max(shares)  # parts that are sent must be of one size
        part = F.pad(x, (0, widest - x.shape[1])) if x.shape[1] < widest else x.contiguous()
        if self.rank:
            self._group.gather([], [part]).wait()
            return x
        parts = [torch.empty_like(part) for _ in shares]
        self._group.gather([parts], [part]).wait()
        return torch.cat([one[:, :width] for one, width in zip(parts, shares, strict=True)], -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's `x`, in the memory of this rank's."""
        if self.size > 1:
            assert self._group is not None
            self._group.broadcast([x]).wait()
        return x

    def numbers(self, number: int, device: torch.device) -> list[int]:
        """Return the numbers of all ranks, in their order."""
        numbers = torch.zeros(self.size, dtype=torch.int64, device=device)
        numbers[self.rank] = number
        found: list[int] = self.sum(numbers).tolist()
        return found


ALONE = Ranks()
"""One process that computes a whole model."""


def share(size: int, rank: int, ranks: int) -> range:
    """Return the part of `size` consecutive things that a rank gets; parts differ by one at most."""
    return range(size * rank // ranks, size * (rank + 1) // ranks)


# Which parts of `TensorNames` are cut, and how; all others are whole in each rank.
_BY_ROWS = ("embedding", "head", "query", "gate", "up", "expert_gate", "expert_up")
_BY_KV_HEADS = ("key", "value")
_BY_COLUMNS = ("output", "down", "expert_down")


class Shard(msgspec.Struct, frozen=True):
    """What one of `ranks` has of the network `whole`, which `refusal` must accept."""

    whole: ArchitectureSpec
    ranks: Ranks

    @property
    def local(self) -> ArchitectureSpec:
        """The network as this rank computes it: its share of the heads and MLPs, and the whole vocabulary."""
        size, whole = self.ranks.size, self.whole
        experts = whole.experts
        if experts is not None:
            experts = msgspec.structs.replace(experts, inner_size=experts.inner_size // size)
        return msgspec.structs.replace(
            whole,
            heads=whole.heads // size,
            kv_heads=len(self._kv_heads),
            intermediate_size=whole.intermediate_size // size,
            experts=experts,
        )

    def rows(self, part: str, size: int) -> range:
        """Return which of the `size` rows of a matrix, or of a bias, this rank has."""
        if part in _BY_KV_HEADS:
            heads, width = self._kv_heads, size // self.whole.kv_heads
            return range(heads.start * width, heads.stop * width)
        return share(size, self.ranks.rank, self.ranks.size) if part in _BY_ROWS else range(size)

    def columns(self, part: str, size: int) -> range:
        """Return which of the `size` columns of a matrix this rank has."""
        return share(size, self.ranks.rank, self.ranks.size) if part in _BY_COLUMNS else range(size)

    @property
    def _kv_heads(self) -> range:
        """The KV heads of this rank. Of fewer heads than ranks, each has the one that its queries use."""
        heads, rank, size = self.whole.kv_heads, self.ranks.rank, self.ranks.size
        if heads >= size:
            return share(heads, rank, size)
        head = heads * rank // size
        return range(head, head + 1)


def refusal(spec: ArchitectureSpec, ranks: int) -> str | None:
    """Return why a network cannot be divided among so many ranks; None if it can."""
    if spec.headless or spec.scores:
        return "models that make embeddings or scores are not divided"
    if spec.heads % ranks:
        return f"its {spec.heads} attention heads cannot be divided by {ranks}"
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        return f"{ranks} is neither a divisor nor a multiple of its {spec.kv_heads} KV heads"
    experts = spec.experts
    if experts is not None and any(experts.layers) and experts.inner_size % ranks:
        return f"its experts' inner size, {experts.inner_size}, cannot be divided by {ranks}"
    if (experts is None or not all(experts.layers)) and spec.intermediate_size % ranks:
        return f"its MLPs' inner size, {spec.intermediate_size}, cannot be divided by {ranks}"
    if spec.vocab_size < ranks:
        return f"its vocabulary has only {spec.vocab_size} tokens"
    return None


class SummedLinear:
    """A `Linear` whose inputs are divided among ranks: each multiplies its part, and the products are added.

    The bias is added once, to the sum.
    """

    def __init__(self, part: Linear, bias: Tensor | None, total: Callable[[Tensor], Tensor]) -> None:
        self.in_features, self.out_features, self.nbytes = part.in_features, part.out_features, part.nbytes
        self._part = part
        self._bias = bias
        self._total = total

    def __call__(self, x: Tensor) -> Tensor:
        result = self._total(self._part(x))
        return result if self._bias is None else result.add_(self._bias)


class SharedEmbedding:
    """An embedding whose tokens are divided among ranks: this one has those of `tokens` in `table`."""

    def __init__(self, table: Tensor, tokens: range, total: Callable[[Tensor], Tensor]) -> None:
        self.table = table
        self._tokens = tokens
        self._total = total

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids [T]: [T, C]."""
        rows = token_ids - self._tokens.start
        elsewhere = (rows < 0) | (rows >= len(self._tokens))
        found = self.table.index_select(0, rows.masked_fill(elsewhere, 0))
        return self._total(found.masked_fill_(elsewhere[:, None], 0))
