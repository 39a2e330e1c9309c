"""What a dispatcher and a front do with messages that were lost, or that arrive twice or too late."""

import pytest
import structlog.testing
import trio

from distributed.frontends.scripted import scripted_dispatcher, scripted_front
from distributed.frontends.system import System, limits, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError, NoNode
from fairlead.base.grant import Grant
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.questions import MAX_ORDERS, FrontQuestions
from fairlead.distributed.frontends.server import AWAY_S, GRACE_S
from fairlead.router.dispatch.waiter import HeldSeat, SeatLoss

QUEUE = QueueConfig(capacity=100, timeout_s=60.0)
OLD = Grant(0, 7)


@pytest.fixture
def system(nursery):
    return System(nursery, {"x": 1, "y": 1})


async def started(system, **options):
    system.start_dispatcher(**options)
    await settle()


def held(node, *, has_begun=False):
    return HeldSeat(node, OLD, 0.0, has_begun)


async def test_refusal_of_a_requeued_job_is_reported_after_a_reconnection(autojump_clock, nursery):
    system = System(nursery, {"x": 1})
    await started(system)
    front, job = await scripted_front(system, "a"), spec(no_queue=True)
    await front.send(wire.SubmitJob(1, job))
    (granted,) = front.of(wire.SeatGranted)
    system.dispatcher.scheduler.node_down("x")
    await front.send(wire.RequeueJob(1, SeatLoss()))
    await front.cut()
    again = await scripted_front(system, "a")
    await again.send(wire.DeclareJob(1, job, 1.0, released=granted.grant), wire.Declared())
    assert [refused.error.kind for refused in again.of(wire.JobRefused)] == ["NoQueue"]


async def test_job_that_is_declared_twice_in_the_grace_time_is_requeued_once(autojump_clock, system):
    await started(system, expected=("a", "b"))
    front = await scripted_front(system, "a")
    await front.send(wire.DeclareJob(1, spec(), 1.0, held("x")), wire.RequeueJob(1, SeatLoss()))
    await front.cut()
    again = await scripted_front(system, "a")
    await again.send(wire.DeclareJob(1, spec(), 1.0, released=OLD), wire.Declared())
    other = await scripted_front(system, "b")
    await other.send(wire.Declared())
    assert [granted.node_id for granted in again.of(wire.SeatGranted)] == ["y"]
    assert system.dispatcher.statistics().running == 1


@pytest.mark.parametrize("is_new_dispatcher", [True, False])
async def test_answer_that_has_begun_waits_for_another_seat_beyond_its_deadline(
    autojump_clock, nursery, is_new_dispatcher
):
    system = System(nursery, {})
    await started(system)
    front = await scripted_front(system, "a")
    if not is_new_dispatcher:
        await front.send(wire.SubmitJob(1, spec()))
    await front.send(wire.DeclareJob(1, spec(), 50.0, released=OLD, has_begun=True), wire.Declared())
    for _ in range(100):
        await trio.sleep(1)
        await front.send(wire.Progress({}))
    assert front.of(wire.JobRefused) == []
    assert system.dispatcher.statistics().waiting == 1


async def test_time_away_begins_with_the_latest_disconnection(autojump_clock, system):
    await started(system)
    front = await scripted_front(system, "a")
    await front.send(wire.SubmitJob(1, spec()))
    await front.cut()
    await trio.sleep(AWAY_S - 1)
    again = await scripted_front(system, "a")
    await again.cut()
    await trio.sleep(AWAY_S - 1)
    assert system.dispatcher.statistics().running == 1
    await trio.sleep(2)
    assert system.dispatcher.statistics().running == 0


async def test_jobs_of_a_front_end_also_after_one_of_its_messages_failed(autojump_clock, system):
    await started(system)
    system.server._questions = FrontQuestions({"fail": lambda _front: 1 // 0}, {})
    front = await scripted_front(system, "a")
    await front.send(wire.SubmitJob(1, spec()), wire.Ask(2, "fail"))
    assert front.has_ended
    await trio.sleep(AWAY_S + 1)
    assert system.dispatcher.statistics().running == 0
    assert system.server.fronts == []


async def test_front_that_was_not_expected_does_not_end_the_grace_time(autojump_clock, system):
    await started(system, expected=("a", "b"))
    for name in ("new", "a"):
        front = await scripted_front(system, name)
        await front.send(wire.SubmitJob(1, spec(name)), wire.Declared())
    assert system.granted == []
    holder = await scripted_front(system, "b")
    await holder.send(wire.DeclareJob(1, spec("b"), 1.0, held("x")), wire.Declared())
    assert system.granted == [("new", "y")]


async def test_grace_time_does_not_wait_for_a_front_that_has_ended(autojump_clock, system):
    await started(system, expected=("a", "b"))
    front = await scripted_front(system, "a")
    await front.send(wire.SubmitJob(1, spec()), wire.Declared())
    assert system.granted == []
    system.server.end_front("b")
    await settle()
    assert len(system.granted) == 1
    assert trio.current_time() < GRACE_S


async def test_grant_that_arrives_after_its_release_is_ignored(autojump_clock, nursery):
    client, dispatcher = await scripted_dispatcher(nursery, lambda found: DispatchClient(found, QUEUE))
    nodes = []

    async def use():
        async with client.seat(spec()) as seat:
            nodes.append(seat.node_id)
            await seat.requeue(SeatLoss())
            nodes.append(seat.node_id)

    nursery.start_soon(use)
    await settle()
    first, second = Grant(1, 1), Grant(1, 2)
    await dispatcher.send(wire.SeatGranted(1, "x", first, 0.0))
    await dispatcher.send(wire.SeatGranted(1, "x", first, 0.0))
    assert nodes == ["x"]
    await dispatcher.send(wire.SeatGranted(1, "y", second, 0.0))
    assert nodes == ["x", "y"]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(ZeroDivisionError(), "FairleadError"), (OSError(), "FairleadError"), (NoNode("none"), "NoNode")],
)
async def test_order_is_answered_whatever_it_raises(autojump_clock, system, failure, kind):
    async def fail():
        raise failure

    await started(system)
    system.server._questions = FrontQuestions({}, {"fail": fail})
    front = await scripted_front(system, "a")
    await front.send(wire.Ask(5, "fail"))
    (answered,) = front.of(wire.Answered)
    assert (answered.number, answered.error.kind) == (5, kind)
    assert isinstance(answered.error.error(), FairleadError)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "there is no question 'unknown'"),
        ("double", "'double' does not take these arguments"),
        ("wait", "'wait' does not take these arguments"),
    ],
)
async def test_invalid_question_ends_the_connection_of_its_front(autojump_clock, system, name, reason):
    await started(system)
    questions = {"double": lambda _front, number: 2 * number}
    system.server._questions = FrontQuestions(questions, {"wait": trio.sleep})
    front = await scripted_front(system, "a")
    await front.send(wire.Ask(1, "double", (4,)))
    assert front.of(wire.Answered) == [wire.Answered(1, 8)]
    with structlog.testing.capture_logs() as logs:
        await front.send(wire.Ask(2, name, (1, 2)))
    assert front.has_ended
    assert [each["reason"] for each in logs if "invalid" in each["event"]] == [reason]


async def test_orders_of_a_front_are_limited_in_number(autojump_clock, system):
    await started(system)
    system.server._questions = FrontQuestions({}, {"wait": trio.sleep})
    front = await scripted_front(system, "a")
    await front.send(*(wire.Ask(number, "wait", (1.0,)) for number in range(MAX_ORDERS + 2)))
    assert [answered.error.kind for answered in front.of(wire.Answered)] == ["QueueFull"] * 2
    await trio.sleep(1)
    await front.send(wire.Ask(1000, "wait", (0.0,)))
    answers = front.of(wire.Answered)
    assert len(answers) == MAX_ORDERS + 3
    assert answers[-1] == wire.Answered(1000)


async def test_jobs_of_a_front_are_limited_in_number(autojump_clock, monkeypatch, system):
    monkeypatch.setattr("fairlead.distributed.frontends.server.MAX_JOBS", 3)
    await started(system)
    front = await scripted_front(system, "a")
    await front.send(*(wire.SubmitJob(number, spec(request_id=f"{number}")) for number in range(1, 5)))
    assert front.has_ended
    assert len(system.server.fronts[0].jobs) == 3


VALID = {"request_id": "r", "tenant": "A", "model": "m"}
NAN = float("nan")


@pytest.mark.parametrize(
    "message",
    [
        ["submit", 9, VALID | {"priority": 8}],
        ["submit", 9, VALID | {"priority": -1}],
        ["submit", 9, VALID | {"sequences": 0}],
        ["submit", 9, VALID | {"prompt_tokens": -1}],
        ["submit", 9, VALID | {"prompt_cache_tokens": 2**60}],
        ["submit", 9, VALID | {"body_bytes": 2**62}],
        ["declare", 9, VALID, NAN],
        ["declare", 9, VALID, float("inf")],
        ["declare", 9, VALID, -1.0],
        ["declare", 9, VALID, 1.0, ["x", [0, 1], NAN, False]],
        ["requeue", 1, True, NAN],
        ["requeue", 1, True, -5.0],
        ["end", 1, -1],
        ["progress", {1: -1}],
        ["progress", {1: 2**62}],
        ["begin", 99],
        ["nonsense"],
        {"no": "message"},
        [],
    ],
)
async def test_message_of_a_broken_front_ends_only_its_connection(autojump_clock, system, message):
    await started(system)
    front, other = await scripted_front(system, "a"), await scripted_front(system, "b")
    await front.send(wire.SubmitJob(1, spec("A")))
    await other.send(wire.SubmitJob(1, spec("B")))
    await front.send_payload(message)
    assert front.has_ended
    assert not other.has_ended
    for _ in range(int(AWAY_S) + 2):
        await trio.sleep(1)
        await other.send(wire.Progress({}))
    assert [each.name for each in system.server.fronts] == ["b"]
    assert system.dispatcher.statistics().running == 1


async def test_seat_at_an_unknown_node_is_forgotten_with_its_job(autojump_clock, system):
    await started(system)
    front = await scripted_front(system, "a")
    for number in range(1, 4):
        declared = wire.DeclareJob(number, spec(request_id=f"{number}"), 0.0, held(f"gone-{number}"))
        await front.send(declared, wire.EndJob(number, 0))
    assert system.dispatcher.scheduler._nodes._expected == {}


async def test_job_of_several_sequences_keeps_all_its_seats_under_the_next_dispatcher(
    autojump_clock, nursery
):
    system = System(nursery, {"x": 4})
    await started(system)
    front, wide = await scripted_front(system, "a"), spec(sequences=3)
    await front.send(wire.SubmitJob(1, wide))
    (granted,) = front.of(wire.SeatGranted)
    assert granted.grant == Grant(1, 1, seats=3)
    system.kill_dispatcher()
    await started(system, expected=("a",))
    again = await scripted_front(system, "a")
    seat = HeldSeat("x", granted.grant, 0.0, has_begun=False)
    await again.send(wire.DeclareJob(1, wide, 1.0, seat), wire.Declared())
    await settle()
    scheduler = system.dispatcher.scheduler
    assert scheduler.node_counts("x").busy == 3
    scheduler.seats_changed("x", frozenset({"m"}), limits(2))  # it keeps what it holds
    assert scheduler.node_counts("x").busy == 3
    await again.send(wire.EndJob(1, 5))
    assert scheduler.node_counts("x").busy == 0
