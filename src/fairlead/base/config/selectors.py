"""Settings of selectors: names that stand for several models, of which each job gets one."""

from collections.abc import Container, Iterator, Mapping
from typing import Any, Literal

import msgspec

from fairlead.base.config.spelling import AtLeastOne, Fault, spelled


class SelectorSettings(msgspec.Struct, frozen=True, rename=spelled):
    """Settings that only some strategies have."""

    spillover: AtLeastOne = 1
    """With spillover: the number of this selector's jobs on each target before the next target is used."""


class SelectorConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A name that stands for several models. Each job that names it is sent to one of them."""

    strategy: Literal["warm", "pin", "spillover"]
    """Which target a job gets. warm: one that is loaded, else the first. pin: always the first. spillover:
    one that is in use, or the next one when those have their number of jobs.
    """
    targets: tuple[str, ...]
    """Names or aliases of models on this server or on nodes. Models that are not served are skipped."""
    settings: SelectorSettings = SelectorSettings()
    title: str = msgspec.field(default="", name="name")
    """Display name."""
    description: str = ""
    """Description for users."""
    unlisted: bool = False
    """Whether it is omitted from the list of models."""
    metadata: dict[str, Any] = {}
    """Further information, shown in the list of models."""

    def contradictions(self) -> Iterator[Fault]:
        """Yield a fault if there are no targets."""
        if not self.targets:
            yield Fault(("targets",), "must be one name or more")


def faults_of_names(selectors: Mapping[str, SelectorConfig], taken: Container[str]) -> Iterator[Fault]:
    """Yield faults of names, and of targets that are selectors. `taken` has the names of models."""
    for name, selector in selectors.items():
        if not name.strip():
            yield Fault((name,), "the name of a selector must not be empty")
        if name in taken:
            yield Fault((name,), "is the name of a model")
        for index, target in enumerate(selector.targets):
            if target in selectors:
                yield Fault((name, "targets", index), f"{target} is a selector, which cannot be a target")
