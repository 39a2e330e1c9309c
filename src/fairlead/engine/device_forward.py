"""A model on a GPU: `forward.Forward` by our own kernels, with decodes as CUDA graphs.

A step of decodes only is one copy and one launch; any other runs layer by layer. Models that are not built
in, or have experts, run their own layers with our attention and without graphs, because their work may
depend on the tokens.
"""

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch
from fairlead.engine import device_layers
from fairlead.engine.arrays import upload
from fairlead.engine.cache import KVCache
from fairlead.engine.device_inputs import DeviceInputs
from fairlead.engine.device_layers import DeviceLayers
from fairlead.engine.device_sampling import warm
from fairlead.engine.graphs import CudaRecorder, Graphs, Recorder, ladder
from fairlead.engine.inputs import BlockTables, Inputs, PreparedStep
from fairlead.engine.models.model import Model
from fairlead.engine.paged_attention import DeviceAttention

logger = logging.getLogger(__name__)


class DeviceForward:
    """`forward.Forward` over `model` and `cache`. Call `prepare` before the first step.

    `recorder` makes graphs; None: no graphs.
    """

    samples_several = False
    columns: ClassVar[dict[str, int]] = {}

    def __init__(self, model: Model, cache: KVCache, recorder: Recorder | None = None) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.vocab_size = model.shape.vocab_size
        self._layers: DeviceLayers | None = None
        if (reason := device_layers.refusal(model)) is None:
            self._layers = DeviceLayers(model)
        else:
            logger.warning("torch runs the model's layers, because in the GPU's kernels %s", reason)
        self._graphs = Graphs(self._decode, recorder) if recorder and self._layers else None
        self._inputs: DeviceInputs | None = None
        self._longest = model.shape.max_positions
        self._logits = torch.empty((0, self.vocab_size), dtype=torch.float32, device=self.device)

    @classmethod
    def on_cuda(cls, model: Model, cache: KVCache, *, records: bool = True) -> "DeviceForward":
        """Make one on a GPU, which becomes the current one: Triton launches on no other.

        With `records`, decodes are recorded as graphs.
        """
        if cache.device.index is not None:
            torch.cuda.set_device(cache.device)
        return cls(model, cache, CudaRecorder(cache.device) if records else None)

    @property
    def kernel(self) -> str:
        """The name "triton", and whether decodes are CUDA graphs."""
        return "triton with CUDA graphs" if self._graphs else "triton"

    @torch.inference_mode()
    def prepare(
        self,
        *,
        slots: int,
        max_batch: int,
        max_batched_tokens: int,
        max_model_len: int,
        most_drafts: int = 0,
        report: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Allocate memory for steps within these limits, compile all kernels and record the graphs.

        Takes some seconds. Runs the largest step once, so that a lack of memory shows now.
        """
        self._longest = max_model_len + 1
        sizes = list(ladder(max_batch))
        rows = max(min(slots * (1 + most_drafts), max_batched_tokens), slots, sizes[-1])
        self._allocate_inputs(slots, max_batched_tokens, rows=rows, most_drafts=most_drafts)
        report(0.0)
        self._layer_by_layer(max_batched_tokens, 1, 0)
        warm(self.vocab_size, self.device)
        if self._graphs is None:
            for size in sizes:
                self._layer_by_layer(size, size, size)
            return
        self._logits = self._logits.new_empty((sizes[-1], self.vocab_size))
        self._graphs.record(max_batch, report)

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Return the memory of these blocks of a KV cache group to the system, if possible; ascending ids."""
        self.cache.release(group, blocks)

    def stage(self, step: PreparedStep, batch: BlockTables, latest: Tensor | None) -> Inputs:
        """Start the copy of a step to the device. `latest` [S]: what the previous step chose, if any.

        The result must be run next; its token ids are valid only afterwards.
        """
        if self._inputs is None or not self._inputs.holds(step, batch):
            raise ValueError(
                f"a step of {step.tokens} tokens in {step.rows} rows, of {batch.slots} slots, is larger than "
                "what was prepared for"
            )
        return self._inputs.stage(step, batch, latest)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the logits of its `logit_tokens`, float32.

        They are valid until the next step.
        """
        rows, decodes = len(inputs.sequence_lengths), inputs.decodes
        if rows == decodes and self._graphs is not None and self._graphs.play(rows):
            return self._logits[:rows]
        hidden = self._layer_by_layer(len(inputs.token_ids), rows, decodes)
        tokens_with_logits = inputs.logit_tokens
        if not len(tokens_with_logits):
            return self._logits[:0]
        return self._to_logits(hidden.index_select(0, upload(tokens_with_logits, self.device)))

    def _decode(self, size: int) -> None:
        """Run `size` decodes, each of which samples: the work that a graph records."""
        self._logits[:size].copy_(self._to_logits(self._layer_by_layer(size, size, size)))

    def _layer_by_layer(self, tokens: int, rows: int, decodes: int) -> Tensor:
        assert self._inputs is not None
        step = self._inputs.unpack(tokens, rows, decodes)
        attention = DeviceAttention(step, self.cache, self.model.shape, self._longest)
        run = self._layers or self.model
        return run.hidden(step.token_ids, step.positions, attention)

    def _to_logits(self, hidden: Tensor) -> Tensor:
        return (self._layers or self.model).logits(hidden)

    def _allocate_inputs(self, slots: int, tokens: int, *, rows: int, most_drafts: int) -> None:
        """Allocate buffers for batches of up to `slots` slots, with sequences as long as any can be."""
        size, groups = self.cache.block_size, len(self.cache.blocks)
        words = InputBatch.arena_size(
            slots=slots,
            max_batched_tokens=tokens,
            max_model_len=self._longest,
            block_size=size,
            groups=groups,
            most_drafts=most_drafts,
        )
        self._inputs = DeviceInputs(
            words=words // 4,
            tokens=max(tokens, rows),
            rows=rows,
            slots=slots,
            columns=-(-self._longest // size) + 1,
            groups=groups,
            vocab_size=self.vocab_size,
            device=self.device,
        )
