"""Any other decoder that the installed transformers supports: its own code with our attention.

The network's modules stay as they are. Our attention replaces theirs, through transformers' registry of
attention functions, so that all sequences of a step run side by side as one row of tokens. While a model is
loaded, it is run once against its own attention, and rejected if the results differ. Code from a model's
repository is never run.

Excluded, each with an error: models with states, convolutions or linear attention in place of a KV
cache, encoders, layers of different sizes or that share a cache, latent attention, attention sinks and
biases, mixtures of experts, checkpoints that are quantized or name tensors differently from the modules.

T tokens of all sequences of a step, flattened; H query heads, K KV heads, D channels per head; V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from fairlead.base.errors import LoadFailed
from fairlead.engine.models.fallback_attention import (
    NAME,
    AttentionCall,
    AttentionForwarder,
    RecordingAttention,
    register_attention,
)
from fairlead.engine.models.fallback_weights import build_without_weights, load_weights
from fairlead.engine.models.model import AttentionFunction
from fairlead.engine.models.weights import Weights
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.folder import unknown_architecture
from fairlead.language.checkpoint.shape import ModelShape

_KINDS = {"full_attention", "sliding_attention", "attention"}
_TRIAL_LENGTHS = [7, 5]  # of the sequences in the trial run of a model


def fallback(
    directory: Path, config: CheckpointConfig, *, max_positions: int
) -> Callable[[Weights], "FallbackModel"]:
    """Return a builder of the model that `config` names; `LoadFailed` if it is known not to run here.

    `read_folder` has accepted `config`, which is in `directory`, where transformers reads it again.
    `max_positions`: the most tokens that a text can have.
    """
    import transformers

    known = set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    name = next(
        (name for name in config.texts("architectures") if name in known and hasattr(transformers, name)),
        None,
    )
    if name is None:
        raise unknown_architecture(config)
    model_class = getattr(transformers, name)
    try:
        model_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever its validation raises
        raise LoadFailed(f"{config.path}: {error}") from error
    if not isinstance(model_config, model_class.config_class):
        raise config.fails("model_type", f"{model_config.model_type!r} does not belong to {name}")
    _check(config, model_class, model_config)
    return lambda weights: FallbackModel(config, model_class, model_config, weights, max_positions)


class FallbackModel:
    """`Model` over a model of transformers."""

    score = None
    takes_embeddings = False  # some of its models look up more than one embedding of a token

    def __init__(
        self,
        config: CheckpointConfig,
        model_class: Any,
        model_config: Any,
        weights: Weights,
        max_positions: int,
    ) -> None:
        self._config = config
        self._max_positions = max_positions
        self._name = model_class.__name__
        register_attention()
        try:
            self._model: Any = build_without_weights(model_class, model_config, weights, NAME)
            load_weights(self._model, weights)
        except LoadFailed:
            raise
        except Exception as error:
            raise self._fails(f"cannot be built: {error}") from error
        self._body = _Body(getattr(self._model, self._model.base_model_prefix))
        self._forwarder = AttentionForwarder(self._model)
        try:
            with torch.inference_mode():
                self.shape = self._compare(model_config, weights)
        except LoadFailed:
            raise
        except Exception as error:
            raise self._fails(f"does not run with our attention: {type(error).__name__}: {error}") from error

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C]. Takes no embeddings."""
        assert embedded is None
        self._forwarder.attention = attention
        try:
            hidden: Tensor = self._body.run(input_ids=token_ids[None], position_ids=positions.long()[None])[0]
            return hidden
        finally:
            self._forwarder.attention = None

    def states(self, hidden: Tensor) -> Tensor:
        """Return each token's final state, for embeddings: `hidden` itself, as the body includes the norm."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits for the needed rows of `hidden`: [T, C] → [T, V]."""
        self._body.output = hidden[None]
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)  # values are unused
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            return logits
        finally:
            self._body.output = None

    def _fails(self, reason: str) -> LoadFailed:
        return self._config.fails("architectures", f"{self._name} {reason}")

    def _compare(self, model_config: Any, weights: Weights) -> ModelShape:
        """Compare two short sequences side by side, as we run them, with each alone, as transformers does.

        The layers' calls to attention in the first run determine the model's shape.
        """
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (sum(_TRIAL_LENGTHS),), generator=generator).to(weights.device)
        positions = torch.cat([torch.arange(length) for length in _TRIAL_LENGTHS]).to(weights.device)
        recording = RecordingAttention(_TRIAL_LENGTHS)
        ours = self.logits(self.hidden(ids, positions, recording)).float()
        if ours.shape[1] > vocabulary:
            raise self._fails(f"has logits for {ours.shape[1]} tokens and an embedding of {vocabulary}")
        self._model.set_attn_implementation("eager")
        alone = [
            self._model(input_ids=part[None], use_cache=False).logits[0]
            for part in torch.split(ids, _TRIAL_LENGTHS)
        ]
        self._model.set_attn_implementation(NAME)
        expected = torch.cat(alone).float()
        error = float((ours - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not error <= (1e-3 if weights.dtype == torch.float32 else 0.1) and bool(expected.isfinite().all()):
            raise self._fails(f"has other results with our attention than with its own ({error:.1%} off)")
        return self._shape(model_config, recording.calls, ours.shape[1])

    def _shape(self, model_config: Any, calls: list[AttentionCall], vocab_size: int) -> ModelShape:
        if [call.layer for call in calls] != list(range(len(calls))) or not calls:
            raise self._fails("does not attend once in every layer")
        first = calls[0]
        for call in calls:
            if msgspec.structs.replace(call, layer=0, window=None) != msgspec.structs.replace(
                first, layer=0, window=None
            ):
                raise self._fails("has layers of different sizes or scales")
        text = model_config.get_text_config()
        windows = tuple(call.window for call in calls)
        _check_windows(self._config, text, windows)
        most = self._max_positions
        return ModelShape(
            vocab_size=vocab_size,
            hidden_size=self._model.get_input_embeddings().weight.shape[1],
            layers=len(calls),
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            max_positions=most,
            windows=tuple(window if window and window < most else None for window in windows),
            attention_scale=first.scale,
            attention_cap=first.cap,
        )


class _Body:
    """A model without its head. While it has an `output`, it returns that, so that only the head runs."""

    def __init__(self, body: Any) -> None:
        self.output: Tensor | None = None
        self._forward = body.forward
        body.forward = self  # on this object, not on its class

    def run(self, **inputs: Tensor) -> Tensor:
        """Return the last layer's output, [1, T, C]."""
        hidden: Tensor = self._forward(**inputs, attention_mask=None, use_cache=False)[0]
        return hidden

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.output is None:
            return self._forward(*inputs, **options)
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.output)


def _check(config: CheckpointConfig, model_class: Any, model_config: Any) -> None:
    """Reject models that are known to be excluded before any weights are read."""
    text = model_config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise config.fails("is_encoder_decoder", "only decoders are supported")
    unknown = set(getattr(text, "layer_types", None) or ()) - _KINDS
    if unknown:
        raise config.fails("layer_types", f"{sorted(unknown)} keep more than keys and values")
    if getattr(text, "num_kv_shared_layers", 0):
        raise config.fails("num_kv_shared_layers", "layers that share a cache are not supported")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise config.fails("architectures", f"{model_class.__name__} has no way to attend with our cache")


def _check_windows(config: CheckpointConfig, text: Any, windows: Sequence[int | None]) -> None:
    """Check that the layers report their windows. We would ignore windows that are only in a model's mask."""
    window = getattr(text, "sliding_window", None)
    if not window or getattr(text, "use_sliding_window", True) is False:
        return
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if any(windows) else None] * len(
        windows
    )
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    if expected != list(windows) or not any(windows):
        raise config.fails("sliding_window", "the layers do not report which of them have a window")
