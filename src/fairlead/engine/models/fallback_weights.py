"""A model of transformers with our weights: built without memory, then filled from the checkpoint.

Guarantees what `Weights` does, for models that name their tensors like their modules. Where that is
impossible, it raises `NotImplementedError` with the reason.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fairlead.engine.models.linear import Linear
from fairlead.engine.models.weights import Weights


def build_without_weights(model_class: Any, config: Any, weights: Weights, attention: str) -> Any:
    """Make transformers' model with its configuration `config`, complete except for its parameters."""
    config.use_cache = False
    with _parameters_without_memory():
        model = model_class._from_config(config, attn_implementation=attention, dtype=weights.dtype)  # noqa: SLF001
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type == "meta":
                raise NotImplementedError(f"its {name} has no value until it is read")
            module._buffers[name] = buffer.to(weights.device)  # noqa: SLF001
    return model.eval()


def load_weights(model: Any, weights: Weights) -> None:
    """Take every parameter from the checkpoint, and replace linear layers by ours."""
    ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    weights.rename(lambda name: None if any(one.search(name) for one in ignored) else name)
    if any(parameter.dim() > 2 for parameter in model.parameters()):
        raise NotImplementedError("only mixtures of experts that are built in are supported")
    names = {id(module): name for name, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is table.weight:
        if head.bias is not None:
            raise NotImplementedError("its head is tied and has a bias")
        tensors = names[id(table)], names[id(head)]
        is_tied = weights.ties(*tensors)
        embedding, projection = weights.vocabulary(*tensors, *table.weight.shape, tied=is_tied)
        table.weight = nn.Parameter(embedding.table, requires_grad=False)
        assert projection is not None
        model.set_submodule(names[id(head)], _LinearModule(projection))
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    linears.sort(key=lambda pair: pair[1] is not head)  # the largest first, while memory is free
    for name, module in linears:
        has_bias = module.bias is not None
        linear = weights.linear({name: module.out_features}, module.in_features, bias=has_bias)
        model.set_submodule(name, _LinearModule(linear))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            tensor = weights.tensor(name, *parameter.shape)
            setattr(model.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
    if shared := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise NotImplementedError(f"{shared[0]} is the same parameter as another")


class _LinearModule(nn.Module):
    """A `Linear` as a module of torch."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Make modules create parameters without memory. Other tensors, such as angles, are still allocated."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
