"""Faults of remote nodes: down, unreachable, failing in every way that HTTP allows, or misreporting usage."""

from functools import partial

from simulation.deployment import NODES
from simulation.injected_faults import ENDS_OF_JOBS, GARBLED, InjectedFault, Stage, Undo
from simulation.node_server import BEFORE, FALSE_USAGES, FATES, MIDWAY, is_well, report_real_usage


def node_down(stage: Stage, fault: InjectedFault) -> Undo:
    """Make some nodes reset every connection."""
    nodes = _some(stage, fault)
    for node in nodes:
        stage.deployment.nodes[node].is_up = False

    def undo() -> None:
        for node in nodes:
            stage.deployment.nodes[node].is_up = True

    return undo


def node_unreachable(stage: Stage, fault: InjectedFault) -> Undo:
    """Drop every packet that would open a connection to some nodes."""
    hosts = {NODES[node] for node in _some(stage, fault)}
    network = stage.parent.system.network
    network.unreachable |= hosts

    def undo() -> None:
        network.unreachable -= hosts

    return undo


def node_failing(stage: Stage, fault: InjectedFault) -> Undo:
    """Make some nodes fail requests in all ways."""
    return _fate(stage, fault, FATES, 0.5)


def node_refusing(stage: Stage, fault: InjectedFault) -> Undo:
    """Make some nodes fail requests before they answer."""
    return _fate(stage, fault, BEFORE, 0.3)


def node_breaking_off(stage: Stage, fault: InjectedFault) -> Undo:
    """Make some nodes fail in the middle of their answers."""
    return _fate(stage, fault, MIDWAY, 0.7)


def node_misreporting(stage: Stage, fault: InjectedFault) -> Undo:
    """Make some nodes report impossible usage. This may cause no error."""
    nodes = _some(stage, fault)
    fault.allowed_errors = frozenset()
    for node in nodes:
        stage.deployment.nodes[node].reported_usage = partial(stage.random.choice, FALSE_USAGES)

    def undo() -> None:
        for node in nodes:
            stage.deployment.nodes[node].reported_usage = report_real_usage

    return undo


def _fate(stage: Stage, fault: InjectedFault, fates: tuple[str, ...], probability: float) -> Undo:
    nodes = _some(stage, fault)
    fault.allowed_errors |= {GARBLED}
    chosen = stage.random.sample(fates, 3)

    def fate(_path: str) -> str | None:
        return stage.random.choice(chosen) if stage.random.random() < probability else None

    for node in nodes:
        stage.deployment.nodes[node].fate = fate

    def undo() -> None:
        for node in nodes:
            stage.deployment.nodes[node].fate = is_well

    return undo


def _some(stage: Stage, fault: InjectedFault) -> list[str]:
    """Return some nodes, and allow the fault to cause errors of their models."""
    nodes = sorted(stage.deployment.nodes)
    chosen = stage.random.sample(nodes, stage.random.randrange(1, len(nodes) + 1))
    fault.allowed_errors = ENDS_OF_JOBS | {"refused"}
    fault.models = frozenset(
        model for node in chosen for model in stage.deployment.nodes[node].names.values()
    )
    return chosen
