"""Any other decoder that the installed transformers supports: its own code with our attention.

The network's modules stay as they are. Our attention replaces theirs, through transformers' registry of
attention functions, so that all sequences of a step run side by side as one row of tokens. While a model is
loaded, it is run once against its own attention, and rejected if the results differ. Code from a model's
repository is never run.

Excluded, each with an error: models with states, convolutions or linear attention in place of a KV
cache, encoders, layers of different sizes or that share a cache, latent attention, attention sinks and
biases, mixtures of experts, checkpoints whose tensors have other names than the modules or are quantized.

T tokens of all sequences of a step, flattened; H query heads, K KV heads, D channels per head; V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from fairlead.errors import LoadFailed
from fairlead.models.borrowed import build_skeleton, fill
from fairlead.models.config import CheckpointConfig
from fairlead.models.layers import Attend
from fairlead.models.rope import Rope
from fairlead.models.shape import REFUSED, ModelShape
from fairlead.models.weights import Weights

_NAME = "fairlead"
_KINDS = {"full_attention", "sliding_attention", "attention"}
_TRIAL = [7, 5]  # lengths of the sequences in the trial run of a model
_CHANGES_SCORES = ("s_aux", "sinks", "position_bias", "attention_bias", "alibi", "head_mask")


def fallback(
    config: CheckpointConfig, names: Sequence[str], built_in: Iterable[str]
) -> Callable[[Weights], "FallbackModel"]:
    """Return a builder of the model that `config` names; `LoadFailed` if it is known not to run here.

    `built_in`: the architectures that do not need transformers, for error messages.
    """
    try:
        import transformers
    except ImportError as error:
        raise config.fails(
            "architectures",
            f"{list(names)} is not supported ({', '.join(built_in)} are, and more with fairlead[hf])",
        ) from error
    for key, reason in REFUSED.items():
        if key in config:
            raise config.fails(key, reason)
    known = set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    name = next((name for name in names if name in known and hasattr(transformers, name)), None)
    if name is None:
        raise config.fails(
            "architectures",
            f"{list(names)} is not supported ({', '.join(built_in)} are, "
            f"and dense decoders of transformers {transformers.__version__})",
        )
    kind = getattr(transformers, name)
    try:
        theirs = transformers.AutoConfig.from_pretrained(config.path.parent, trust_remote_code=False)
    except Exception as error:  # whatever its validation raises
        raise LoadFailed(f"{config.path}: {error}") from error
    if not isinstance(theirs, kind.config_class):
        raise config.fails("model_type", f"{theirs.model_type!r} does not belong to {name}")
    return lambda weights: FallbackModel(config, kind, theirs, weights)


class FallbackModel:
    """`registry.Model` over a model of transformers."""

    def __init__(self, config: CheckpointConfig, kind: Any, theirs: Any, weights: Weights) -> None:
        self._config = config
        self._name = kind.__name__
        _register()
        _check(config, kind, theirs)
        try:
            self._model: Any = build_skeleton(kind, theirs, weights, _NAME)
            fill(self._model, weights)
        except LoadFailed:
            raise
        except Exception as error:
            raise self._fails(f"cannot be built: {error}") from error
        self._body = _Body(getattr(self._model, self._model.base_model_prefix))
        self._bridge = _Bridge()
        for module in self._model.modules():
            module.fairlead = self._bridge  # where `_attend` finds it
        try:
            with torch.inference_mode():
                self.shape = self._try(theirs, weights)
        except LoadFailed:
            raise
        except Exception as error:
            raise self._fails(f"does not run with our attention: {type(error).__name__}: {error}") from error

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C]."""
        self._bridge.attend = attend
        try:
            hidden: Tensor = self._body.run(input_ids=token_ids[None], position_ids=positions.long()[None])[0]
            return hidden
        finally:
            self._bridge.attend = None

    def states(self, hidden: Tensor) -> Tensor:
        """Return each token's final state, for embeddings: `hidden` itself, as the body includes the norm."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits for the needed rows of `hidden`: [T, C] → [T, V]."""
        self._body.held = hidden[None]
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)  # values are unused
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            return logits
        finally:
            self._body.held = None

    def _fails(self, reason: str) -> LoadFailed:
        return self._config.fails("architectures", f"{self._name} {reason}")

    def _try(self, theirs: Any, weights: Weights) -> ModelShape:
        """Run two short sequences side by side as we do, and each alone as transformers does.

        The layers' calls to attention in the first run determine the model's shape.
        """
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (sum(_TRIAL),), generator=generator).to(weights.device)
        positions = torch.cat([torch.arange(length) for length in _TRIAL]).to(weights.device)
        trial = _Trial()
        ours = self.logits(self.hidden(ids, positions, trial)).float()
        if ours.shape[1] > vocabulary:
            raise self._fails(f"scores {ours.shape[1]} tokens and knows {vocabulary}")
        self._model.set_attn_implementation("eager")
        alone = [
            self._model(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(ids, _TRIAL)
        ]
        self._model.set_attn_implementation(_NAME)
        expected = torch.cat(alone).float()
        error = float((ours - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not error <= (1e-3 if weights.dtype == torch.float32 else 0.1) and bool(expected.isfinite().all()):
            raise self._fails(f"says something else with our attention than with its own ({error:.1%} off)")
        return self._shape(theirs, trial.calls, ours.shape[1])

    def _shape(self, theirs: Any, calls: "list[_Call]", vocab_size: int) -> ModelShape:
        if [call.layer for call in calls] != list(range(len(calls))) or not calls:
            raise self._fails("does not attend once in every layer")
        first = calls[0]
        for call in calls:
            if msgspec.structs.replace(call, layer=0, window=None) != msgspec.structs.replace(
                first, layer=0, window=None
            ):
                raise self._fails("has layers of different sizes or scales")
        text = theirs.get_text_config()
        windows = tuple(call.window for call in calls)
        _check_windows(self._config, text, windows)
        most = _read_max_positions(self._config, text)
        return ModelShape(
            vocab_size=vocab_size,
            hidden_size=self._model.get_input_embeddings().weight.shape[1],
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            layers=len(calls),
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            max_positions=most,
            norm_epsilon=getattr(text, "rms_norm_eps", 1e-6),
            rope=Rope(theta=1.0),  # transformers' own code rotates the heads
            windows=tuple(window if window and window < most else None for window in windows),
            attention_scale=first.scale,
            attention_cap=first.cap,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
        )


class _Call(msgspec.Struct, frozen=True):
    """The parameters of one layer's attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    cap: float | None
    window: int | None


class _Bridge:
    """Passes the modules' attention calls to the `Attend` of the current step."""

    def __init__(self) -> None:
        self.attend: Attend | None = None

    def __call__(self, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attend = self.attend
        if attend is None:
            raise NotImplementedError("its layers are run by something else than its body")
        if isinstance(attend, _Trial):
            attend.calls.append(call)
        return attend(call.layer, query, key, value)


class _Trial:
    """Plain attention over the sequences of the trial run, which records its calls."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        call = self.calls[-1]
        found = []
        parts = zip(*(torch.split(one, _TRIAL) for one in (query, key, value)), strict=True)
        for q, k, v in parts:
            k, v = (one.repeat_interleave(call.heads // call.kv_heads, 1).transpose(0, 1) for one in (k, v))  # noqa: PLW2901
            scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * call.scale  # [H, T, T]
            if call.cap is not None:
                scores = torch.tanh(scores / call.cap) * call.cap
            distance = torch.arange(len(q), device=q.device)
            distance = distance[:, None] - distance
            hidden = (distance < 0) | (distance >= (call.window or len(q)))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
            found.append((weights @ v).transpose(0, 1).flatten(1))
        return torch.cat(found)


class _Body:
    """A model without its head. While something is `held`, it returns that, so that only the head runs."""

    def __init__(self, body: Any) -> None:
        self.held: Tensor | None = None
        self._forward = body.forward
        body.forward = self  # on this object, not on its class

    def run(self, **inputs: Tensor) -> Tensor:
        """Return the last layer's output, [1, T, C]."""
        hidden: Tensor = self._forward(**inputs, attention_mask=None, use_cache=False)[0]
        return hidden

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.held is None:
            return self._forward(*inputs, **options)
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.held)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  ours does its own masking
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers' modules: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
    for name in _CHANGES_SCORES:
        if others.get(name) is not None:
            raise NotImplementedError(f"its attention has {name}")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise NotImplementedError("its attention also looks ahead")
    if value.shape != key.shape:
        raise NotImplementedError("its keys and values differ in size")
    heads, length, head_dim = query.shape[1:]
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    call = _Call(
        module.layer_idx, heads, key.shape[1], head_dim, scale, softcap or None, sliding_window or None
    )
    found: Tensor = module.fairlead(call, *(one[0].transpose(0, 1) for one in (query, key, value)))
    return found.view(1, length, heads, head_dim), None


def _register() -> None:
    """Register `_attend` with transformers, without masks. Registering it again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)


def _check(config: CheckpointConfig, kind: Any, theirs: Any) -> None:
    """Reject models that are known to be excluded before any weights are read."""
    text = theirs.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise config.fails("is_encoder_decoder", "only decoders are supported")
    strange = set(getattr(text, "layer_types", None) or ()) - _KINDS
    if strange:
        raise config.fails("layer_types", f"{sorted(strange)} keep more than keys and values")
    if getattr(text, "num_kv_shared_layers", 0):
        raise config.fails("num_kv_shared_layers", "layers that share a cache are not supported")
    if not getattr(kind, "_supports_attention_backend", False):
        raise config.fails("architectures", f"{kind.__name__} has no way to attend with our cache")


def _read_max_positions(config: CheckpointConfig, text: Any) -> int:
    """Return the most tokens that a text can have. longrope has different angles for short and long texts,
    which one batch cannot mix: of such a model only short texts are served.
    """
    most = getattr(text, "max_position_embeddings", None)
    if type(most) is not int or most < 1:
        raise config.fails("max_position_embeddings", f"must be a positive integer, not {most!r}")
    rope = getattr(text, "rope_parameters", None) or {}
    if "longrope" not in {rope.get("rope_type"), rope.get("type")}:
        return most
    trained = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return min(most, trained or most)


def _check_windows(config: CheckpointConfig, text: Any, windows: Sequence[int | None]) -> None:
    """Check that the layers report their windows: a model may set them in its mask alone, which we ignore."""
    window = getattr(text, "sliding_window", None)
    if not window or getattr(text, "use_sliding_window", True) is False:
        return
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if any(windows) else None] * len(
        windows
    )
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    if expected != list(windows) or not any(windows):
        raise config.fails("sliding_window", "the layers do not say which of them slide")
