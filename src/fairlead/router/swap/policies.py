"""The eviction policies that a configuration can name. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from fairlead.base.config import GroupSwap, LruSwap, MatrixSwap, NamedSwap, SwapConfig
from fairlead.base.registry import Registry
from fairlead.router.swap.gpus import Gpus
from fairlead.router.swap.group import Group, GroupPolicy
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.matrix import MatrixPolicy
from fairlead.router.swap.policy import EvictionPolicy, KeepEverything

# Arguments: the settings, memory in MiB by model, and the GPUs. The latter two change between decisions.
PolicyFactory = Callable[[Any, Mapping[str, float], Gpus], EvictionPolicy]


def policy_for(swap: SwapConfig, memory_mb: Mapping[str, float], gpus: Gpus | None = None) -> EvictionPolicy:
    """Return the policy. `memory_mb` has each model's memory, and `gpus` its GPU; both change in place.

    Raises `ConfigError` if there is no policy of that name, and the errors of the policy for its settings.
    """
    gpus = Gpus() if gpus is None else gpus
    if isinstance(swap, NamedSwap):
        return POLICIES.find(swap.policy, "routing", "router", "use")(swap.settings, memory_mb, gpus)
    return POLICIES.find(str(swap.__struct_config__.tag))(swap, memory_mb, gpus)


def _keep(_swap: object, _memory_mb: Mapping[str, float], _gpus: Gpus) -> EvictionPolicy:
    return KeepEverything()


def _group(swap: GroupSwap, _memory_mb: Mapping[str, float], _gpus: Gpus) -> EvictionPolicy:
    groups = {
        name: Group(group.members, group.swap, group.exclusive, group.persistent)
        for name, group in swap.groups.items()
    }
    return GroupPolicy(groups)


def _matrix(swap: MatrixSwap, _memory_mb: Mapping[str, float], _gpus: Gpus) -> EvictionPolicy:
    return MatrixPolicy(swap.sets, variables=swap.variables, evict_costs=swap.evict_costs)


def _lru(swap: LruSwap, memory_mb: Mapping[str, float], gpus: Gpus) -> EvictionPolicy:
    return LruPolicy(max_loaded=swap.max_loaded, capacity_mb=swap.memory_mb, memory_mb=memory_mb, gpus=gpus)


POLICIES: Registry[PolicyFactory] = Registry(
    "eviction policy",
    "fairlead.eviction_policies",
    {"keep": _keep, "group": _group, "matrix": _matrix, "lru": _lru},
)
