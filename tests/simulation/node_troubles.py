"""Faults of remote nodes: down, unreachable, failing in every way that HTTP allows, or misreporting usage."""

from functools import partial

from simulation.node_server import BEFORE, FATES, LIES, MIDWAY, is_well, tells_the_truth
from simulation.troubles import ENDS_OF_JOBS, GARBLED, Stage, Trouble, Undo
from simulation.world import NODES


def node_down(stage: Stage, trouble: Trouble) -> Undo:
    """Make some nodes reset every connection."""
    nodes = _some(stage, trouble)
    for node in nodes:
        stage.world.nodes[node].is_up = False

    def undo() -> None:
        for node in nodes:
            stage.world.nodes[node].is_up = True

    return undo


def node_unreachable(stage: Stage, trouble: Trouble) -> Undo:
    """Drop every packet that would open a connection to some nodes."""
    hosts = {NODES[node] for node in _some(stage, trouble)}
    network = stage.parent.system.network
    network.unreachable |= hosts

    def undo() -> None:
        network.unreachable -= hosts

    return undo


def node_failing(stage: Stage, trouble: Trouble) -> Undo:
    """Make some nodes fail requests in all ways."""
    return _fate(stage, trouble, FATES, 0.5)


def node_refusing(stage: Stage, trouble: Trouble) -> Undo:
    """Make some nodes fail requests before they answer."""
    return _fate(stage, trouble, BEFORE, 0.3)


def node_breaking_off(stage: Stage, trouble: Trouble) -> Undo:
    """Make some nodes fail in the middle of their answers."""
    return _fate(stage, trouble, MIDWAY, 0.7)


def node_lying(stage: Stage, trouble: Trouble) -> Undo:
    """Make some nodes report impossible usage. This excuses no error."""
    nodes = _some(stage, trouble)
    trouble.excuses = frozenset()
    for node in nodes:
        stage.world.nodes[node].lie = partial(stage.random.choice, LIES)

    def undo() -> None:
        for node in nodes:
            stage.world.nodes[node].lie = tells_the_truth

    return undo


def _fate(stage: Stage, trouble: Trouble, fates: tuple[str, ...], probability: float) -> Undo:
    nodes = _some(stage, trouble)
    trouble.excuses |= {GARBLED}
    chosen = stage.random.sample(fates, 3)

    def fate(_path: str) -> str | None:
        return stage.random.choice(chosen) if stage.random.random() < probability else None

    for node in nodes:
        stage.world.nodes[node].fate = fate

    def undo() -> None:
        for node in nodes:
            stage.world.nodes[node].fate = is_well

    return undo


def _some(stage: Stage, trouble: Trouble) -> list[str]:
    """Return some nodes, and make the fault excuse errors of their models."""
    nodes = sorted(stage.world.nodes)
    chosen = stage.random.sample(nodes, stage.random.randrange(1, len(nodes) + 1))
    trouble.excuses = ENDS_OF_JOBS | {"refused"}
    trouble.models = frozenset(model for node in chosen for model in stage.world.nodes[node].names.values())
    return chosen
