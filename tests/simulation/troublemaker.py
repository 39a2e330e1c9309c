"""All kinds of fault by name, and what begins and ends them."""

from collections.abc import Callable, Sequence

import trio

from simulation import child_troubles, machine_troubles, node_troubles
from simulation.troubles import Stage, Trouble, Undo

# Each begins the fault, sets what it excuses, and returns a function that ends it.
KINDS: dict[str, Callable[[Stage, Trouble], Undo]] = {
    kind.__name__: kind
    for kind in (
        machine_troubles.disk_full,
        machine_troubles.disk_unreadable,
        machine_troubles.clock_jump,
        machine_troubles.suspension,
        machine_troubles.crowd,
        machine_troubles.out_of_descriptors,
        machine_troubles.no_descriptor_now_and_then,
        machine_troubles.out_of_memory,
        machine_troubles.no_threads,
        machine_troubles.reload,
        child_troubles.child_killed,
        child_troubles.child_stopped,
        child_troubles.child_slow,
        child_troubles.child_fated,
        child_troubles.child_not_loading,
        child_troubles.spawn_failing,
        node_troubles.node_down,
        node_troubles.node_unreachable,
        node_troubles.node_failing,
        node_troubles.node_refusing,
        node_troubles.node_breaking_off,
        node_troubles.node_lying,
    )
}


class Troublemaker:
    """Begins and ends faults of a `Stage`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def kinds(self, only: Sequence[str] | None = None) -> list[str]:
        """Return the kinds of fault that this world can have; with `only`, those among them."""
        has_nodes = bool(self._stage.world.nodes)
        possible = (name for name in KINDS if has_nodes or not name.startswith("node"))
        return sorted(name for name in possible if only is None or name in only)

    async def make(self, name: str, seconds: float) -> None:
        """Cause a fault of this kind for this many seconds."""
        trouble = Trouble(name, trio.current_time())
        self._stage.troubles.append(trouble)
        self._stage.machine.note("trouble", name, seconds)
        undo = KINDS[name](self._stage, trouble)
        try:
            await trio.sleep(seconds)
        finally:
            undo()
            trouble.ended_s = trio.current_time()
            self._stage.machine.note("trouble over", name)
