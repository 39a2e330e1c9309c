"""What a selector is told: a name that stands for several models, of which each job gets one."""

from collections.abc import Container, Iterator, Mapping
from typing import Any, Literal

import msgspec

from fairlead.config.spelling import AtLeastOne, Fault, spelled


class SelectorSettings(msgspec.Struct, frozen=True, rename=spelled):
    """What only some strategies have."""

    spillover: AtLeastOne = 1
    """Jobs of this selector that a target has before the next one is begun with, where they spill over."""


class SelectorConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A name that stands for several models: each job for it gets one of them, and is then one for that."""

    strategy: Literal["warm", "pin", "spillover"]
    """Which target a job gets: one that is loaded, else the first (warm), the first (pin), or one after the
    other as they fill up (spillover).
    """
    targets: tuple[str, ...]
    """The models, by name or alias, of this server or of others; who is not served is passed over."""
    settings: SelectorSettings = SelectorSettings()
    title: str = msgspec.field(default="", name="name")
    """What people call it."""
    description: str = ""
    """What people should know of it."""
    unlisted: bool = False
    """Whether it is left out of the list of models."""
    metadata: dict[str, Any] = {}
    """Whatever else is to be told of it."""

    def contradictions(self) -> Iterator[Fault]:
        """Say that it stands for nothing."""
        if not self.targets:
            yield Fault(("targets",), "must be one name or more")


def faults_of_names(selectors: Mapping[str, SelectorConfig], taken: Container[str]) -> Iterator[Fault]:
    """Say which selectors have a name that cannot be, or stand for others; `taken` are names of models."""
    for name, selector in selectors.items():
        if not name.strip():
            yield Fault((name,), "the name of a selector must not be empty")
        if name in taken:
            yield Fault((name,), "is the name of a model")
        for index, target in enumerate(selector.targets):
            if target in selectors:
                yield Fault((name, "targets", index), f"{target} is a selector, which cannot be a target")
