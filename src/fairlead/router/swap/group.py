"""Groups: members replace each other, and a group may evict all others. llama-swap's default engine."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.router.swap.policy import EvictionPolicy, SwapReason


class Group(msgspec.Struct, frozen=True):
    """The models of one group.

    members: their names.
    swap: whether only one of them runs at a time.
    exclusive: whether loading one stops the members of all other groups that are not `persistent`.
    persistent: whether it is spared by exclusive groups.
    """

    members: tuple[str, ...]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


class GroupPolicy(EvictionPolicy):
    """Decides by the groups. As in llama-swap, models without a group form one: one at a time, exclusive.

    Raises `ValueError` for a model in two groups.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._group_of: dict[str, Group] = {}
        self._name_of: dict[str, str] = {}
        for name, group in groups.items():
            for member in group.members:
                if member in self._group_of:
                    raise ValueError(f"{name}.members: {member} is in another group already")
                self._group_of[member] = group
                self._name_of[member] = name
        self._rest = Group(members=())

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return which of the `running` models must stop so that `target` can be loaded."""
        own = self._group(target)
        return frozenset(model for model in running if self._is_evicted(model, own))

    def reason_for(self, target: str, running: Sequence[str]) -> SwapReason:
        """See `EvictionPolicy`: the rule is the target's group."""
        reason = super().reason_for(target, running)
        name = self._name_of.get(target)
        return reason if name is None else msgspec.structs.replace(reason, rule=f"group {name}")

    def _group(self, model: str) -> Group:
        return self._group_of.get(model, self._rest)

    def _is_evicted(self, model: str, own: Group) -> bool:
        group = self._group(model)
        # By identity: two groups without members in common may be equal.
        return own.swap if group is own else own.exclusive and not group.persistent
