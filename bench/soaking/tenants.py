"""The clients of a soak: their requests, their behaviour, and the check of each outcome.

Every client is a loop with its own random numbers. A request with an unexpected outcome is a problem.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from schema_storm import hostile
from soaking.deployment import SWAPPING, Deployment
from soaking.exchange import Answer, Client

HANGS_S = 100.0  # more than any timeout of the configuration
SLOW_S = 20.0  # after this time a slow reader disconnects
PROBLEMS_AT_MOST = 200
SWAP_PERIOD_S = 15.0  # for this time most requests for swapped models are for the same one
CANARY_S = 1.5
CANARY = {"prompt": "Count from 1 to 30.", "max_tokens": 40, "temperature": 0}

# Codes of refusals without a free place, and of requests for a model that had a fault.
NO_ROOM = frozenset({"queue_full", "displaced", "rate_limited", "no_queue", "queue_timeout"})
OF_HARM = frozenset({"engine_failed", "node_failed", "load_failed", "no_node", "model_loading", "unloaded"})

DIALECTS = ("/v1/chat/completions", "/v1/completions")
RELAYED = (*DIALECTS, "/v1/messages", "/v1/responses")
_CHAT = [{"role": "user", "content": "hi"}]
# Orders that a tenant's key must not give; harmless to the soak if it may, which is a problem.
_ORDERS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/nodes", {"id": "mine", "url": "http://127.0.0.1:9", "models": ["mine"]}),
    ("DELETE", "/nodes/mine", None),
    ("POST", "/nodes/mine/drain", {}),
    ("POST", "/models/unload", {"model": "mine"}),
    ("POST", "/models/load", {"model": "mine"}),
    ("GET", "/models/steady/logs", None),
)
WORDS = ("fair", "queue", "seat", "slot", "block", "turn", "wait", "node", "model", "token", "plan", "count")


@dataclass
class LoadReport:
    """The outcomes of the requests, and the times of the measured ones in seconds.

    For fair tenants, `firsts` are (when, time to the first event) and `gaps` (when, time between two pieces).
    `answered` counts successes by route and model.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    requests: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    canaries: Counter[str] = field(default_factory=Counter)

    def problem(self, text: str) -> None:
        """Record a problem."""
        if len(self.problems) < PROBLEMS_AT_MOST:
            self.problems.append(text)


class Tenants:
    """All clients of a soak. `run` is the load; it returns after `stop`, when every request has ended."""

    def __init__(self, deployment: Deployment, report: LoadReport, seed: int) -> None:
        self._deployment = deployment
        self._report = report
        self._seed = seed
        self._is_stopping = False
        self._ids = 0
        self._canary: str | None = None

    def stop(self) -> None:
        """Start no more requests."""
        self._is_stopping = True

    async def run(self) -> None:
        """Send requests until stopped."""
        loops: list[tuple[Callable[[random.Random, Client], Awaitable[None]], str, float, int]] = [
            # behaviour, tenant, mean pause in seconds, number of clients
            (self._generate, "ana", 0.3, 2),
            (self._generate, "bob", 0.3, 2),
            (self._generate, "greedy", 0.0, 6),
            (self._relay, "ana", 0.2, 2),
            (self._relay, "greedy", 0.0, 2),
            (self._send_for_many_users, "portal", 0.3, 1),
            (self._leave, "bob", 0.2, 3),
            (self._cancel, "ana", 0.3, 1),
            (self._embed, "bob", 0.5, 1),
            (self._tokenize, "ana", 0.3, 1),
            (self._read_status, "admin", 0.5, 1),
            (self._abuse, "hostile", 0.3, 1),
            (self._bomb, "hostile", 2.0, 1),
            (self._request_many_answers, "greedy", 5.0, 1),
            (self._look_for_prompts, "bob", 1.0, 1),
            (self._look_for_responses, "portal", 1.0, 1),
            (self._steer_the_fleet, "hostile", 2.0, 1),
            (self._leave_unread, "slow", 5.0, 1),
            (self._read_slowly, "slow", 1.0, 1),
            (self._watch_canary, "canary", CANARY_S, 1),
        ]
        async with trio.open_nursery() as nursery:
            for what, tenant, pause_s, number in loops:
                for index in range(number):
                    chance = random.Random(f"{self._seed} {what.__name__} {tenant} {index}")
                    nursery.start_soon(self._loop, what, tenant, pause_s, chance)

    async def _loop(
        self,
        what: Callable[[random.Random, Client], Awaitable[None]],
        tenant: str,
        pause_s: float,
        chance: random.Random,
    ) -> None:
        client = self._deployment.client(tenant, pause_s=0.5 if tenant == "slow" else 0.0)
        try:
            while not self._is_stopping:
                await what(chance, client)
                await trio.sleep(chance.expovariate(1 / pause_s) if pause_s else 0)
        finally:
            client.close()

    # Behaviour ------------------------------------------------------------------------------------------

    async def _generate(self, chance: random.Random, client: Client) -> None:
        model = self._model(chance)
        path = chance.choice(RELAYED if model in ("talker", "far") else DIALECTS)
        await self._send(client, path, model, _body(chance, path), measured=model == "steady")

    async def _relay(self, chance: random.Random, client: Client) -> None:
        path = chance.choice((*RELAYED, "/v1/messages/count_tokens"))
        await self._send(client, path, "far", _body(chance, path))

    async def _send_for_many_users(self, chance: random.Random, client: Client) -> None:
        body = _body(chance, "/v1/completions") | {
            "user": f"person {chance.randrange(10**9)}",
            "max_tokens": 2,
        }
        await self._send(client, "/v1/completions", "steady", body)

    async def _leave(self, chance: random.Random, client: Client) -> None:
        model = self._model(chance)
        with trio.move_on_after(chance.expovariate(2.0)) as leaving:
            await self._send(client, "/v1/completions", model, _body(chance, "/v1/completions"))
        if leaving.cancelled_caught:
            self._report.outcomes["left"] += 1

    async def _cancel(self, chance: random.Random, client: Client) -> None:
        self._ids += 1
        request_id = f"soak-{self._ids}"
        body = _body(chance, "/v1/completions") | {"max_tokens": 200, "ignore_eos": True}
        other = self._deployment.client("ana")
        async with trio.open_nursery() as nursery:
            ask = self._send
            nursery.start_soon(lambda: ask(client, "/v1/completions", "steady", body, request_id=request_id))
            await trio.sleep(chance.expovariate(2.0))
            answer = await other.ask("POST", f"/v1/requests/{request_id}/cancel")
            if answer.status not in (200, 404):  # 404: it had ended
                self._report.problem(f"cancel was answered {answer.status}")
        other.close()

    async def _embed(self, chance: random.Random, client: Client) -> None:
        model = "vectors" if self._current_model() == "vectors" else "far"
        body = {"input": [_text(chance) for _ in range(chance.randint(1, 8))]}
        await self._send(client, "/v1/embeddings", model, body)

    async def _tokenize(self, chance: random.Random, client: Client) -> None:
        answer = await self._send(client, "/tokenize", "steady", {"prompt": _text(chance, 200)})
        if answer.status == 200:
            body = {"tokens": json.loads(answer.body)["tokens"]}
            await self._send(client, "/detokenize", "steady", body)

    async def _read_status(self, chance: random.Random, client: Client) -> None:
        paths = ("/health", "/ready", "/running", "/queue", "/metrics", "/nodes", "/v1/models")
        answer = await client.ask("GET", chance.choice(paths))
        if answer.status not in (200, 503):  # /ready is 503 while a model loads, /health while one hangs
            self._report.problem(f"a probe was answered {answer.status} {answer.ending}")
        if chance.random() < 0.02:
            model = chance.choice(("victim", "talker"))
            force = chance.random() < 0.5
            self._deployment.harm(f"unload {model}{' by force' if force else ''}", model)
            await client.ask("POST", "/models/unload", {"model": model, "force": force})

    async def _abuse(self, chance: random.Random, client: Client) -> None:
        path = chance.choice((*RELAYED, "/v1/embeddings", "/tokenize", "/detokenize", "/models/load"))
        answer = await client.ask("POST", path, _hostile(chance))
        self._report.outcomes[f"hostile {answer.status}"] += 1
        if answer.status >= 500 or (answer.status == 0 and answer.ending == "cut"):
            self._report.problem(f"hostile body to {path}: {answer.status} {answer.code} {answer.ending}")

    # What a tenant might do to others; what is measured in detail by `bench/hostile.py`.

    async def _bomb(self, chance: random.Random, client: Client) -> None:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": hostile(chance.getrandbits(60))},
        }
        body = {"model": "steady", "messages": _CHAT, "max_tokens": 20, "response_format": form}
        with trio.move_on_after(HANGS_S) as hanging:
            answer = await client.ask("POST", "/v1/chat/completions", body)
            self._report.outcomes[f"bomb {answer.status}"] += 1
            is_too_busy = answer.code == "engine_failed" and answer.ending == "whole"  # to try the grammar
            if (answer.status >= 500 and not is_too_busy) or answer.ending == "cut":
                self._report.problem(f"bomb: {answer.status} {answer.code} {answer.ending}")
        if hanging.cancelled_caught:
            self._report.problem(f"a schema had no answer after {HANGS_S:g} s: {json.dumps(form)[:300]}")

    async def _request_many_answers(self, chance: random.Random, client: Client) -> None:
        body = {"prompt": _text(chance), "n": 64, "max_tokens": 20}
        await self._send(client, "/v1/completions", "steady", body)

    async def _look_for_prompts(self, chance: random.Random, client: Client) -> None:
        """Send a prompt as ana, then as bob: his answer must not tell that she has sent it."""
        said = f"{chance.getrandbits(60)} {_text(chance, 60)}"
        body = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
        first = self._deployment.client("ana")
        for sender in (first, client):
            answer = await self._send(sender, "/v1/chat/completions", "steady", body)
            details = (
                json.loads(answer.body)["usage"]["prompt_tokens_details"] if answer.status == 200 else None
            )
            if (
                details and details["cached_tokens"] >= 16
            ):  # less is of the template, and of bob's own prompts
                self._report.problem(
                    f"{details['cached_tokens']} tokens of another tenant's prompt were cached"
                )
        first.close()

    async def _look_for_responses(self, chance: random.Random, client: Client) -> None:
        """Keep a response of one user, and request it as another one of the same trusted key."""
        body = {"input": _text(chance), "max_output_tokens": 2, "user": "person 1"}
        answer = await self._send(client, "/v1/responses", "steady", body)
        if answer.status == 200 and not answer.code:
            path = f"/v1/responses/{json.loads(answer.body)['id']}"
            for method in ("GET", "DELETE"):
                answer = await client.ask(method, path)
                if answer.status != 404:
                    self._report.problem(f"{method} of another user's response was answered {answer.status}")

    async def _steer_the_fleet(self, chance: random.Random, client: Client) -> None:
        method, path, body = chance.choice(_ORDERS)
        answer = await client.ask(method, path, body)
        self._report.outcomes[f"order {answer.status}"] += 1
        if answer.status != 403:
            self._report.problem(f"{method} {path} of a tenant was answered {answer.status}")

    async def _leave_unread(self, chance: random.Random, _client: Client) -> None:
        """Keep a large response, and request it from many connections that do not read it."""
        body = {
            "input": _text(chance),
            "max_output_tokens": 200,
            "ignore_eos": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 20,
        }
        quick = self._deployment.client("slow")
        answer = await self._send(quick, "/v1/responses", "steady", body)
        quick.close()
        if answer.status != 200 or answer.code:
            return
        path = f"/v1/responses/{json.loads(answer.body)['id']}"
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                reader = self._deployment.client("slow", pause_s=60.0)
                nursery.start_soon(_ask_and_close, reader, path)
            await trio.sleep(3)
            nursery.cancel_scope.cancel()

    async def _read_slowly(self, chance: random.Random, client: Client) -> None:
        client.pause_s = chance.choice(
            (0.3, 1.0, 8.0)
        )  # the last one is longer than the limit for stalled clients
        body = _body(chance, "/v1/completions") | {
            "stream": True,
            "max_tokens": 300,
            "ignore_eos": True,
            "n": 4,
        }
        await self._send(client, "/v1/completions", "steady", body, slow=True)

    async def _watch_canary(self, _chance: random.Random, client: Client) -> None:
        for model in ("steady", "victim") if self._current_model() == "victim" else ("steady",):
            answer = await self._send(client, "/v1/completions", model, CANARY)
            if answer.status == 200 and not answer.code and answer.ending == "whole":
                text = json.loads(answer.body)["choices"][0]["text"]
                self._canary = self._canary or text
                self._report.canaries["same" if text == self._canary else "changed"] += 1
                if text != self._canary:
                    self._report.problem(f"the canary of {model} got {text!r}, not {self._canary!r}")

    # Outcomes -------------------------------------------------------------------------------------------

    async def _send(
        self,
        client: Client,
        path: str,
        model: str,
        body: dict[str, Any],
        *,
        request_id: str = "",
        measured: bool = False,
        slow: bool = False,
    ) -> Answer:
        began_s = time.monotonic()
        self._report.requests += 1
        answer = Answer()
        with trio.move_on_after(SLOW_S if slow else HANGS_S) as hanging:
            answer = await client.ask("POST", path, body | {"model": model}, request_id)
        if hanging.cancelled_caught and slow:
            self._report.outcomes["left"] += 1
            return answer
        if hanging.cancelled_caught:
            self._report.problem(f"{path} for {model} had not ended after {HANGS_S:g} s")
            return answer
        outcome = self._outcome(answer, model, is_stream=bool(body.get("stream")), began_s=began_s)
        allowed = outcome in ("success", "no room", "harmed")
        allowed |= outcome == "cancelled" and bool(request_id)
        allowed |= outcome == "cut" and slow
        self._report.outcomes[outcome if allowed else f"unexpected {outcome}"] += 1
        if outcome == "success":
            self._report.answered[f"{path} of {model}"] += 1
        if not allowed:
            at_s = time.monotonic() - self._deployment.began_s
            body_end = answer.body[-300:].decode(errors="replace")
            self._report.problem(
                f"{at_s:.0f} s: {path} for {model}: {outcome}, {answer.status} {answer.code} {body_end!r}"
            )
        if measured and outcome == "success" and body.get("stream"):
            now_s = time.monotonic()
            if answer.first_s is not None:
                self._report.firsts.append((now_s, answer.first_s))
            self._report.gaps += [(now_s, gap_s) for gap_s in answer.gaps_s]
        return answer

    def _outcome(self, answer: Answer, model: str, *, is_stream: bool, began_s: float) -> str:
        code = answer.code
        if answer.ending == "whole" and answer.status == 200 and not code:
            return "success" if not is_stream or answer.is_ended_stream else "a stream without an end"
        if code == "cancelled":
            return "cancelled"
        if code in NO_ROOM:
            return "no room"
        if self._deployment.is_harmed(model, began_s) and (code in OF_HARM or answer.ending == "cut"):
            return "harmed"
        return "cut" if answer.ending == "cut" else "refused"

    def _model(self, chance: random.Random) -> str:
        model_of_session = self._current_model()
        if model_of_session == "vectors":  # an embedding model
            model_of_session = "far"
        models = ("steady", "far", model_of_session, chance.choice(("victim", "talker")))
        return chance.choices(models, (60, 20, 19, 1))[0]

    def _current_model(self) -> str:
        """Return the model that currently gets most requests for swapped models."""
        return SWAPPING[int((time.monotonic() - self._deployment.began_s) / SWAP_PERIOD_S) % len(SWAPPING)]


async def _ask_and_close(client: Client, path: str) -> None:
    try:
        await client.ask("GET", path)
    finally:
        client.close()


def _text(chance: random.Random, words: int = 30) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, words)))


def _body(chance: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": chance.choice((1, 8, 30, 60)), "stream": chance.random() < 0.6}
    if chance.random() < 0.5:
        body |= {"temperature": 0}
    else:
        body |= {"temperature": 1.0, "seed": chance.randrange(1000)}
    match path:
        case "/v1/completions":
            return body | {"prompt": _text(chance)}
        case "/v1/responses":
            return body | {"input": _text(chance), "max_output_tokens": body.pop("max_tokens")}
        case "/v1/messages/count_tokens":
            return {"messages": [{"role": "user", "content": _text(chance)}]}
        case _:
            return body | {"messages": [{"role": "user", "content": _text(chance)}]}


def _hostile(chance: random.Random) -> bytes:
    valid_body = json.dumps(_body(chance, "/v1/chat/completions") | {"model": "steady"}).encode()
    match chance.randrange(7):
        case 0:
            return valid_body[: chance.randrange(len(valid_body))]
        case 1:
            return bytes(chance.randrange(256) for _ in range(chance.randrange(1, 300)))
        case 2:
            return b"[" * chance.choice((100, 10_000))
        case 3:
            at = chance.randrange(len(valid_body))
            return valid_body[:at] + bytes([chance.randrange(256)]) + valid_body[at + 1 :]
        case 4:
            return valid_body.replace(b'"max_tokens": ', b'"max_tokens": 1e999, "x": ')
        case 5:
            return b'{"model": "steady", "prompt": "%s", "max_tokens": 1}' % (b"a " * 30_000)
        case _:
            return b'{"model": "nobody", "messages": [{"role": "user", "content": {"a": null}}]}'
