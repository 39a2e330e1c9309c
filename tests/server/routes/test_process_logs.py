"""`GET /models/{name}/logs`: the lines of a model's processes, which keys may read them, and following."""

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey, SelectorConfig
from fairlead.base.errors import ModelNotFound, quoted
from fairlead.nodes.processes.output import LINES_KEPT, ProcessOutput
from fairlead.server.routes.process_logs import MAX_FOLLOWERS, plain_line
from fake_fleet import FakeFleet

LOGS = "/models/small/logs"


@pytest.fixture
def fleet() -> FakeFleet:
    fleet = FakeFleet(["small", "org/other"])
    for line in ("loading", "", "ready"):
        fleet.output("small").add(line)
    return fleet


@pytest.mark.parametrize("path", [LOGS, "/models/tiny/logs", LOGS + "?follow=false"])
async def test_kept_lines_are_plain_text(client_with, fleet, path):
    reply = await client_with(fleet=fleet).get(path)
    assert (reply.status, reply.body) == (200, b"loading\n\nready\n")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_model_with_a_slash_in_its_name_has_logs(client_with, fleet):
    fleet.output("org/other").add("hello")
    client = client_with(fleet=fleet, models={"small": None, "org/other": None})
    for path in ("/models/org/other/logs", "/models/org%2Fother/logs"):
        assert (await client.get(path)).body == b"hello\n"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[32mgreen\x1b[0m \x1b[2J\x1b[1;1H", "green "),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("bell\x07 back\x08 \x9b", "bell\\x07 back\\x08 \\x9b"),
        ("10 %\r20 %", "10 %\\r20 %"),
        ("a\tb", "a\tb"),
        ("\x1b(alone", "\\x1b(alone"),
        ("right to left: \u202e", "right to left: \\u202e"),
        ("日本語 ✓", "日本語 ✓"),
    ],
)
async def test_control_characters_are_made_safe(client_with, fleet, printed, shown):
    fleet.output("small").add(printed)
    assert (await client_with(fleet=fleet).get(LOGS)).body.decode().split("\n")[-2] == shown
    assert plain_line(printed) == shown


@pytest.mark.parametrize("value", ["", "yes", "True", "1"])
async def test_follow_must_be_true_or_false(client_with, fleet, value):
    reply = await client_with(fleet=fleet).get(f"{LOGS}?follow={value}")
    assert (reply.status, reply.error["param"]) == (400, "follow")
    assert reply.error["message"] == f"follow: must be true or false, not {quoted(value)}"


async def test_unknown_model_is_a_404(client_with, fleet):
    reply = await client_with(fleet=fleet).get("/models/none/logs")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_selector_has_no_logs(client_with, fleet):
    selectors = {"any": SelectorConfig(strategy="pin", targets=("small",))}
    reply = await client_with(fleet=fleet, selectors=selectors).get("/models/any/logs")
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_key_reads_the_logs_of_its_models_only(client_with, fleet):
    client = client_with(
        ApiKey("sk", models=("small",), role="operator"),
        fleet=fleet,
        models={"small": None, "org/other": None},
    )
    headers = {"Authorization": "Bearer sk"}
    assert (await client.get(LOGS)).status == 401
    assert (await client.get(LOGS, headers=headers)).status == 200
    assert (await client.get("/models/org/other/logs", headers=headers)).status == 403


# Following ------------------------------------------------------------------------------------------


class Follower:
    """A client that follows the lines, and the data that it has received."""

    def __init__(self, client, nursery: trio.Nursery) -> None:
        self.pieces: list[bytes] = []
        self.disconnected = trio.Event()
        self.over = trio.Event()
        self.reply = None
        nursery.start_soon(self._run, client)

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode()

    async def _run(self, client) -> None:
        self.reply = await client.get(
            f"{LOGS}?follow=true", disconnected=self.disconnected, pieces=self.pieces
        )
        self.over.set()


async def test_follower_gets_the_kept_lines_and_then_each_new_one(
    client_with, fleet, nursery, autojump_clock
):
    follower = Follower(client_with(fleet=fleet), nursery)
    await trio.sleep(1)
    assert follower.text == "loading\n\nready\n"
    fleet.output("small").add("asked \x1b[1msomething")
    await trio.sleep(1)
    assert follower.text == "loading\n\nready\nasked something\n"
    assert not follower.over.is_set()


async def test_follower_gets_the_number_of_lines_it_missed(client_with, fleet, nursery, autojump_clock):
    follower = Follower(client_with(fleet=fleet), nursery)
    await trio.sleep(1)
    before = len(follower.text)
    for number in range(LINES_KEPT + 7):
        fleet.output("small").add(str(number))
    await trio.sleep(1)
    lines = follower.text[before:].splitlines()
    assert (lines[0], lines[1], len(lines)) == ("(7 lines were dropped)", "7", LINES_KEPT + 1)


async def test_followers_are_bounded_and_a_disconnect_frees_a_place(
    client_with, fleet, nursery, autojump_clock
):
    client = client_with(fleet=fleet)
    followers = [Follower(client, nursery) for _ in range(MAX_FOLLOWERS)]
    await trio.sleep(1)
    refused = await client.get(f"{LOGS}?follow=true")
    assert (refused.status, refused.error["code"]) == (429, "rate_limited")
    assert (await client.get(LOGS)).status == 200
    followers[0].disconnected.set()
    await trio.sleep(1)
    another = Follower(client, nursery)
    await trio.sleep(1)
    assert another.text == "loading\n\nready\n"


async def test_following_ends_when_the_server_drains(client_with, fleet, nursery, autojump_clock):
    draining = trio.Event()
    follower = Follower(client_with(fleet=fleet, draining=draining.is_set), nursery)
    await trio.sleep(1)
    fleet.output("small").add("last words")
    draining.set()
    with trio.fail_after(1):
        await follower.over.wait()
    assert follower.text.endswith("last words\n")
    assert follower.reply.is_complete


@pytest.mark.parametrize("removed", [True, False])
async def test_following_ends_when_the_model_is_removed_or_replaced(
    client_with, fleet, nursery, autojump_clock, removed
):
    follower = Follower(client_with(fleet=fleet), nursery)
    await trio.sleep(1)
    if removed:
        fleet.refusal = ModelNotFound("gone")
    else:
        fleet.outputs["small"] = ProcessOutput()
    with trio.fail_after(1):
        await follower.over.wait()
    assert follower.reply.is_complete
