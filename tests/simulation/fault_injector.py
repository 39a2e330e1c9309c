"""All kinds of fault by name, and what begins and ends them."""

from collections.abc import Callable, Sequence

import trio

from simulation import child_faults, machine_faults, node_faults
from simulation.injected_faults import InjectedFault, Stage, Undo

# Each begins the fault, sets which errors it may cause, and returns a function that ends it.
KINDS: dict[str, Callable[[Stage, InjectedFault], Undo]] = {
    kind.__name__: kind
    for kind in (
        machine_faults.disk_full,
        machine_faults.disk_unreadable,
        machine_faults.clock_jump,
        machine_faults.suspension,
        machine_faults.connection_flood,
        machine_faults.out_of_descriptors,
        machine_faults.no_descriptor_at_times,
        machine_faults.out_of_memory,
        machine_faults.no_threads,
        machine_faults.reload,
        child_faults.child_killed,
        child_faults.child_stopped,
        child_faults.child_slow,
        child_faults.child_fated,
        child_faults.child_not_loading,
        child_faults.spawn_failing,
        node_faults.node_down,
        node_faults.node_unreachable,
        node_faults.node_failing,
        node_faults.node_refusing,
        node_faults.node_breaking_off,
        node_faults.node_misreporting,
    )
}


class FaultInjector:
    """Begins and ends faults of a `Stage`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def kinds(self, only: Sequence[str] | None = None) -> list[str]:
        """Return the kinds of fault that this deployment can have; with `only`, those among them."""
        has_nodes = bool(self._stage.deployment.nodes)
        possible = (name for name in KINDS if has_nodes or not name.startswith("node"))
        return sorted(name for name in possible if only is None or name in only)

    async def make(self, name: str, seconds: float) -> None:
        """Cause a fault of this kind for this many seconds."""
        fault = InjectedFault(name, trio.current_time())
        self._stage.faults.append(fault)
        self._stage.machine.note("fault", name, seconds)
        undo = KINDS[name](self._stage, fault)
        try:
            await trio.sleep(seconds)
        finally:
            undo()
            fault.ended_s = trio.current_time()
            self._stage.machine.note("fault over", name)
