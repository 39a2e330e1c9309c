"""Translates llama-swap's configuration. Pure.

The table `WITHOUT_EFFECT` lists settings that we do not implement; requests are served the same.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from fairlead.base.config import (
    AnyModelConfig,
    CommandConfig,
    Fault,
    FiltersConfig,
    GroupSwap,
    KeepSwap,
    MatrixSwap,
    NodeConfig,
    SwapConfig,
)
from fairlead.base.config.spelling import Key, KeyPath, faults_of, settings_of
from fairlead.router.swap.matrix import MatrixError, expand
from fairlead.server.configfile.sections import FileSettings, Peer

N = TypeVar("N", CommandConfig, NodeConfig)

MIN_READY_TIMEOUT_S = 15.0  # a shorter healthCheckTimeout counts as this, as in llama-swap

# `*` is any key. True: dropped without a check. False: kept, because the list of models shows it.
WITHOUT_EFFECT: dict[tuple[str, ...], bool] = {
    ("logToStdout",): True,
    ("logTimeFormat",): True,
    ("logRequests",): True,
    ("metricsMaxInMemory",): True,
    ("captureBuffer",): True,
    ("store",): True,
    ("ui",): True,
    ("performance",): True,
    ("profiles",): True,  # no profile is active at the start, and none can be chosen
    ("routing", "scheduler", "use"): True,  # there is only one
    ("models", "*", "timeouts", "keepalive"): True,
    ("models", "*", "timeouts", "tlsHandshake"): True,
    ("models", "*", "timeouts", "expectContinue"): True,
    ("peers", "*", "timeouts", "keepalive"): True,
    ("peers", "*", "timeouts", "tlsHandshake"): True,
    ("peers", "*", "timeouts", "expectContinue"): True,
    ("models", "*", "compat", "ignoreWebsockets"): True,  # there are no WebSockets that could load a model
    ("models", "*", "name"): False,
    ("models", "*", "description"): False,
    ("models", "*", "metadata"): False,
    ("models", "*", "capabilities"): False,
}

_SETTINGS = frozenset(("models", "macros", *(setting.spelling for setting in settings_of(FileSettings))))

_NOTHING_ELSE = (("models", "*", "compat"),)  # sections that may be empty afterwards


def unused(tree: dict[str, Any], anchors: Collection[str] = ()) -> list[KeyPath]:
    """Return the paths of settings without effect; remove those that are dropped.

    `anchors` are the keys at the top level to which other values refer. Those that are no settings are
    dropped; an unknown key to which nothing refers may be a misspelling, and stays.
    """
    without_effect = []
    for pattern, dropped in WITHOUT_EFFECT.items():
        for path, parent in _matching(tree, pattern):
            if path == ("store",) and isinstance(parent["store"], str):
                continue  # our own setting of this name; llama-swap's is a mapping
            without_effect.append(path)
            if dropped:
                del parent[path[-1]]
    for key in [key for key in tree if _holds_anchors(key, anchors)]:
        without_effect.append((key,))
        del tree[key]
    for pattern in _NOTHING_ELSE:
        for path, parent in _matching(tree, pattern):
            if not parent[path[-1]]:
                del parent[path[-1]]
    return without_effect


def swap_of(settings: FileSettings, *, has_commands: bool) -> tuple[tuple[str, ...], SwapConfig]:
    """Return the eviction policy, and the path of its setting.

    Without one, a file with commands means one model at a time, as in llama-swap; otherwise all models stay.
    """
    return next(settings.choices(), ((), GroupSwap() if has_commands else KeepSwap()))


def faults_of_swap(swap: SwapConfig, models: Iterable[str]) -> Iterator[Fault]:
    """Yield what is wrong with the policy, with paths relative to it. Groups may name unknown models."""
    if isinstance(swap, GroupSwap):
        yield from (Fault(fault.path[1:], fault.message) for fault in faults_of(swap))
    elif isinstance(swap, MatrixSwap):
        faults = tuple(faults_of(swap))
        yield from faults or _faults_of_matrix(swap, frozenset(models))


def unknown_members(swap: SwapConfig, models: Iterable[str]) -> Iterator[KeyPath]:
    """Yield the paths of group members that are not models: llama-swap ignores them, too."""
    known = frozenset(models)
    if isinstance(swap, GroupSwap):
        for name, group in swap.groups.items():
            yield from ((name, "members", i) for i, member in enumerate(group.members) if member not in known)


def nodes_of_peers(
    peers: Mapping[str, Peer], models: Iterable[AnyModelConfig], selectors: Iterable[str] = ()
) -> tuple[NodeConfig, ...]:
    """Return peers as nodes. Raises `ConfigError`.

    A peer's model is named `peer/model`. It also has its own name, unless that is the name of another peer's
    model, of one of ours or of a selector.
    """
    taken = {name for model in models for name in (model.name, *model.aliases)}.union(selectors)
    qualified = {f"{peer_id}/{name}" for peer_id, peer in peers.items() for name in peer.models}
    counts: dict[str, int] = {}
    for peer in peers.values():
        for name in set(peer.models):
            counts[name] = counts.get(name, 0) + 1
    nodes = []
    for peer_id, peer in peers.items():
        own = {f"{peer_id}/{name}": name for name in peer.models}
        alone = [name for name in peer.models if counts[name] == 1 and name not in taken | qualified]
        nodes.append(
            NodeConfig(
                id=peer_id,
                url=peer.proxy,
                api_key=peer.api_key or None,
                seats=peer.seats,
                models=tuple(dict.fromkeys((*own, *alone))),
                model_names=own,
                filters=peer.filters,
                timeouts=peer.timeouts,
            )
        )
    return tuple(nodes)


def without_model_filter(node: N) -> N:
    """Return a node or command with filters that leave `model` as it is: jobs are routed by it."""
    filters = FiltersConfig(
        strip_params=tuple(name for name in node.filters.strip_params if name != "model"),
        set_params=_without_model(node.filters.set_params),
        set_params_by_id={
            called: _without_model(params) for called, params in node.filters.set_params_by_id.items()
        },
    )
    return msgspec.structs.replace(node, filters=filters)


def _without_model(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "model"}


def _faults_of_matrix(swap: MatrixSwap, models: frozenset[str]) -> Iterator[Fault]:
    for name, model in swap.variables.items():
        if model not in models:
            yield Fault(("vars", name), f"there is no model {model}")
    for name in swap.evict_costs:
        if name not in swap.variables and name not in models:
            yield Fault(("evict_costs", name), "is neither one of vars nor a model")
    try:
        named = frozenset[str]().union(*expand(swap.sets, swap.variables))
    except MatrixError as error:
        at = max((name for name in swap.sets if str(error).startswith(f"sets.{name}:")), key=len, default="")
        yield Fault(("sets", at), str(error).removeprefix(f"sets.{at}: "))
        return
    for model in sorted(named - models - frozenset(swap.variables.values())):
        at = next((name for name, text in swap.sets.items() if model in text), "")
        yield Fault(("sets", at), f"there is no model {model}")


def _holds_anchors(key: str, anchors: Collection[str]) -> bool:
    return key == "defs" or key.startswith("x-") or (key in anchors and key not in _SETTINGS)


def _matching(tree: Any, pattern: tuple[str, ...]) -> list[tuple[KeyPath, dict[Key, Any]]]:
    """Return the path of each value that matches a pattern, and the mapping that it is in."""
    matches: list[tuple[KeyPath, Any]] = [((), tree)]
    for part in pattern[:-1]:
        matches = [
            ((*path, key), value[key])
            for path, value in matches
            if isinstance(value, dict)
            for key in (value if part == "*" else [part])
            if key in value
        ]
    last = pattern[-1]
    return [((*path, last), value) for path, value in matches if isinstance(value, dict) and last in value]
