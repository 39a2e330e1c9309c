"""What may be left in a simulated server after all jobs have ended: nothing."""

import trio

from distributed.frontends.simulated_server import SimulatedServer
from distributed.frontends.system import spec

SETTLE_S = 16.0  # in which the jobs of ended fronts end, too


async def check_end(world: SimulatedServer) -> list[str]:
    """Return the problems that are found after all jobs have ended."""
    with trio.move_on_after(SETTLE_S):
        while found := left_over(world):  # noqa: ASYNC110  no event reports it
            await trio.sleep(0.5)
    if found:
        return [f"left: {found}"]
    return await _check_counts(world) + await _check_seats(world)


def left_over(world: SimulatedServer) -> dict[str, int | str]:
    """Return what must not be there when there are no jobs, with its number."""
    if world.leader is None:
        return {"dispatcher": "none"}
    left = {
        **left_in_dispatcher(world.leader),
        **{
            f"{front.name} does not follow the leader": not front.client.is_connected
            or front.client.epoch != world.leader.epoch
            for front in world.fronts.values()
        },
        **{f"jobs of {front.name}": len(front.client) for front in world.fronts.values()},
        **{f"charges of {front.name}": len(front.quotas._running) for front in world.fronts.values()},
        **{f"accepted by {engine.node_id}": len(engine.accepted) for engine in world.engines},
        **{f"grants of {engine.node_id}": len(engine.grants) for engine in world.engines},
        **{f"{engine.node_id} is down": not engine.is_up for engine in world.engines},
        "fronts that have not started": world.plan.fronts - len(world.fronts),
    }
    return {name: count for name, count in left.items() if count}


def left_in_dispatcher(found) -> dict[str, int]:
    """Return what a dispatcher without any jobs must not have."""
    dispatcher, server = found.dispatcher, found.server
    statistics = dispatcher.statistics()
    alarms = sum(not alarm.dropped for _, _, alarm in dispatcher._timer._alarms)
    return {
        "waiting": statistics.waiting,
        "running": statistics.running,
        "busy seats": sum(node.busy for node in dispatcher.scheduler.nodes()),
        "alarms": alarms - 1 - len(dispatcher._pauses) - len(dispatcher._failed),  # one is for charging
        "waiters": len(dispatcher._waiters) + len(dispatcher._by_id),
        "running estimates": len(dispatcher.estimator._running),
        "jobs at the server": sum(len(front.jobs) for front in server.fronts),
        "jobs of the grace time": len(server._early or {}) + len(server._early_requeues),
        "charges": sum(map(len, found.quotas._charges.values())),
        "concurrent jobs": sum(quota.running for quota in found.quotas._quotas.values()),
    }


async def _check_counts(world: SimulatedServer) -> list[str]:
    """Counts of all fronts: none twice, and without a dead front or dispatcher all of them."""
    problems = []
    own = sum(front.ended for front in world.fronts.values())
    most = own + world.dead_fronts_ended + world.counted_again
    with trio.move_on_after(SETTLE_S):
        while True:
            for front in world.fronts.values():
                await front.counts.refresh()
            totals = [sum(front.counts.totals().jobs.outcomes.values()) for front in world.fronts.values()]
            if min(totals) >= own:
                break
            await trio.sleep(0.5)
    if not own <= min(totals) <= max(totals) <= most:
        problems.append(f"counted: {totals} jobs, of {own} to {most}")
    may_spend = len(world.plan.jobs) + world.charged_again
    if (spent := spent_requests(world.leader)) > may_spend:
        problems.append(f"charged twice: {spent} requests of {may_spend}")
    return problems


async def _check_seats(world: SimulatedServer) -> list[str]:
    """All seats can be had at once."""
    problems: list[str] = []
    seats = sum(engine.seats for engine in world.engines)
    front = next(iter(world.fronts.values()))
    async with trio.open_nursery() as nursery:
        held = trio.Event()
        granted = []

        async def hold(number: int) -> None:
            async with front.client.seat(spec("Z", f"last {number}")):
                granted.append(number)
                await held.wait()

        for number in range(seats):
            nursery.start_soon(hold, number)
        with trio.move_on_after(SETTLE_S):
            while len(granted) < seats:  # noqa: ASYNC110  a connection may be about to end
                await trio.sleep(0.5)
        await trio.sleep(0.5)
        assert world.leader is not None
        if len(granted) != seats or world.leader.dispatcher.statistics().running != seats:
            problems.append(f"seat lost: {len(granted)} of {seats} can be had")
        nursery.cancel_scope.cancel()
    return problems


def spent_requests(found) -> int:
    """Return how many requests of the key a dispatcher has counted in the last minute."""
    quotas = [quota for (owner, _), quota in found.quotas._quotas.items() if owner]
    return sum(quota.usage(trio.current_time()).requests for quota in quotas)
