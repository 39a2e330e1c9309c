"""A small real model, a gateway that follows a script, and a client that calls the application by ASGI."""

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import structlog
import tokenizers
import trio
import trio.testing
from structlog.testing import LogCapture

import shared_trials
from fairlead.base.config import ApiKey, Config, Limits, ModelConfig, QueueConfig
from fairlead.base.errors import Cancelled, FairleadError
from fairlead.base.job import Delta, Job
from fairlead.base.requester import Requester
from fairlead.base.telemetry import logs
from fairlead.generation.gateway import Answer, Gateway
from fairlead.generation.metrics.job_metrics import JobStatistics
from fairlead.generation.services import Services
from fairlead.language.text.model import TextModel
from fairlead.nodes.streams.deltas import Deltas
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.server.routes.route import Route
from fairlead.server.routes.route_table import ROUTES
from fairlead.server.routes.routes import Application
from fake_fleet import FakeFleet
from server.routes import remote_responses

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    '{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "{{ '\\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINES = ["hello world", "the quick brown fox", "<|user|>hello<|assistant|>", "one two three"]


@pytest.fixture(autouse=True)
def _shared_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_trials.share(monkeypatch)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return small_model(tmp_path_factory.mktemp("small"))


def small_model(directory: Path, template: str = TEMPLATE) -> TextModel:
    """Return a model with a byte-level vocabulary and this chat template, written to a directory."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config": {"max_position_embeddings": 4096, "eos_token_id": 0},
        "generation_config": {"do_sample": True, "temperature": 0.7, "top_k": 20},
        "tokenizer_config": {"chat_template": template, "eos_token": "<eos>"},
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return TextModel.load(directory, name="small")


Step = list[Delta] | FairleadError | float | None
Script = Callable[[Job], Iterable[Step]]


@dataclass
class FakeGateway(Gateway):
    """Puts each step of the script into the deltas and waits until it is processed.

    A number is a pause in seconds; at None it blocks.

    Before that, a job is queued for `wait_s`. Then it is refused, if there is a `refusal`, or occupies its
    seat for `prefill_s` before its first step.
    """

    script: Script
    refusal: Exception | None = None
    wait_s: float = 0.0
    prefill_s: float = 0.0
    estimated_wait_s: int | None = None
    queue_position: int | None = None
    estimated_wait_p90_s: int | None = None
    jobs: list[Job] = field(default_factory=list)
    ended: int = 0
    _scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    _waits_until: dict[str, float] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        (job,) = self.jobs
        return job

    async def serve(
        self,
        job: Job,
        *,
        seated: Callable[[], Awaitable[None]] | None = None,
        task_status: trio.TaskStatus[Answer] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        self.jobs.append(job)
        assert job.request_id not in self._scopes
        answer = Answer(
            Deltas(job.sequences),
            waited_s=self.wait_s,
            estimated_wait_s=self.estimated_wait_s,
            estimated_wait_p90_s=self.estimated_wait_p90_s,
            queue_position=self.queue_position,
        )
        begun = False
        try:
            with trio.CancelScope() as self._scopes[job.request_id]:
                await self._wait(job, seated)
                for step in self.script(job):
                    await self._play(step, answer.deltas)
                    if not begun:
                        task_status.started(answer)
                        begun = True
                    await trio.testing.wait_all_tasks_blocked()
                return
            error = Cancelled("the request was cancelled")
            if not begun:
                raise error
            answer.deltas.fail(error)
        finally:
            del self._scopes[job.request_id]
            self.ended += 1

    async def cancel(
        self, request_id: str, by: Requester, *, others: frozenset[str] | None = frozenset()
    ) -> bool:
        found = [
            job
            for job in self.jobs
            if job.request_id == request_id
            and (job.owner == by.owner or others is None or job.model in others)
        ]
        scope = self._scopes.get(request_id)
        if not found or scope is None:
            return False
        scope.cancel()
        return True

    def statistics(self) -> JobStatistics:
        """Return empty statistics."""
        return JobStatistics({}, {})

    async def waiting(self, request_id: str) -> WaitEstimate | None:
        """Return the position, which decreases by one a second."""
        if request_id not in self._waits_until:
            return None
        left_s = round(self._waits_until[request_id] - trio.current_time())
        return WaitEstimate(position=left_s, estimated_wait_s=8 * left_s)

    async def _wait(self, job: Job, seated: Callable[[], Awaitable[None]] | None) -> None:
        if self.wait_s:
            self._waits_until[job.request_id] = trio.current_time() + self.wait_s
            try:
                await trio.sleep(self.wait_s)
            finally:
                del self._waits_until[job.request_id]
        if self.refusal is not None:
            raise self.refusal
        if seated is not None:
            await seated()
        await trio.sleep(self.prefill_s)

    async def _play(self, step: Step, deltas: Deltas) -> None:
        if step is None:
            await trio.sleep_forever()
        elif isinstance(step, float):
            await trio.sleep(step)
        elif isinstance(step, FairleadError):
            deltas.fail(step)
        else:
            for delta in step:
                deltas.put(delta)


def hello_world(job: Job) -> list[Step]:
    """Return a script in which every choice generates "Hello" and then " world"."""
    choices = range(job.sequences)
    return [
        [Delta(index, "Hello", [10]) for index in choices],
        [Delta(index, " world", [11, 12]) for index in choices],
        [Delta(index, "", [0], finish_reason="stop") for index in choices],
    ]


@dataclass
class Reply:
    """A response received over ASGI. `pieces`: the body as it was sent. `is_complete`: it has its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[bytes]:
        """The data of the server-sent events."""
        return [event.removeprefix(b"data: ") for event in self._blocks if not event.startswith(b":")]

    @property
    def comments(self) -> list[str]:
        """The comments between the events."""
        return [block.decode() for block in self._blocks if block.startswith(b":")]

    @property
    def _blocks(self) -> list[bytes]:
        *blocks, rest = self.body.split(b"\n\n")
        assert rest == b""
        assert all(block.startswith((b"data: ", b": ")) for block in blocks)
        return blocks

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream that ended with `[DONE]`, without that."""
        *events, end = self.events
        assert end == b"[DONE]"
        return [json.loads(event) for event in events]


class Client:
    """Sends one request at a time to the application, without a socket."""

    def __init__(self, app: Callable[..., Awaitable[None]], gateway: FakeGateway | None) -> None:
        self.app = app
        self.gateway = gateway

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.send("GET", path, b"", **options)

    async def post(self, path: str, content: Any, **options: Any) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await self.send("POST", path, body, **options)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        headers: Any = (),
        client: tuple[str, int] | None = ("192.0.2.7", 4711),
        disconnected: trio.Event | None = None,
        pieces: list[bytes] | None = None,
    ) -> Reply:
        reply = Reply(pieces=[] if pieces is None else pieces)
        disconnected = trio.Event() if disconnected is None else disconnected
        received: list[dict[str, Any]] = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": body, "more_body": False},
        ]

        async def receive() -> dict[str, Any]:
            if len(received) == 1:
                await disconnected.wait()
            return received.pop()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            else:
                reply.is_complete = not message.get("more_body", False)
                if message["body"]:
                    reply.pieces.append(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path.partition("?")[0]),
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode(), value.encode("latin-1")) for name, value in dict(headers).items()
            ],
            "client": client,
            "server": ("127.0.0.1", 8000),
            "state": {"limits": Limits()},
            "extensions": {},
        }
        await self.app(scope, receive, send)
        return reply


async def estimate(_model: str, _tenant: str, _priority: int, _team: str) -> dict[str, Any]:
    """Return an estimate for a queue that is not empty."""
    return {"position": 3, "estimated_wait_s": 24, "estimated_wait_p90_s": None}


def client_of(
    model: TextModel,
    *api_keys: ApiKey,
    queue: QueueConfig | None = None,
    gateway_script: Script | None = None,
    routes: Sequence[Route] = ROUTES,
    bypasses_quart: bool = True,
    **changes: Any,
) -> Client:
    """Return a client of an application with these keys; `changes` replace the other services."""
    gateway = FakeGateway(gateway_script or hello_world)
    card = ModelConfig(path=Path(), name=model.name)
    services: dict[str, Any] = {
        "config": Config(
            models=(card,), api_keys=api_keys, queue=queue or QueueConfig(), limits=Limits(sequences=8)
        ),
        "gateway": gateway,
        "models": {model.name: model},
        "aliases": {"tiny": model.name},
        "ready": lambda: True,
        "queue_statistics": lambda: {"waiting": 2, "running": 1, "capacity": 100, "seats": 1},
        "estimate": estimate,
        **changes,
    }
    services.setdefault("fleet", FakeFleet(services["models"]))
    return Client(Application(Services(**services), routes, bypasses_quart=bypasses_quart), gateway)


@pytest.fixture
def client(model: TextModel) -> Client:
    return client_of(model)


@pytest.fixture
def client_with(model: TextModel) -> Callable[..., Client]:
    """A function that returns a client of an application with these keys, or with other services."""
    return lambda *api_keys, **changes: client_of(model, *api_keys, **changes)


@pytest.fixture
def relay_client(client_with: Callable[..., Client]) -> Client:
    """A client of an application with one local model and one on another server."""
    return client_with(
        fleet=FakeFleet(["small"], ["remote"]),
        aliases={"tiny": "small", "away": "remote"},
        gateway_script=remote_responses.complete_response,
    )


@pytest.fixture
def chat() -> Callable[..., dict[str, Any]]:
    """A function that returns the body of a chat request."""
    return lambda **fields: {"model": "small", "messages": [{"role": "user", "content": "hello"}], **fields}


@pytest.fixture
def log() -> Iterator[Any]:
    """The log entries written while the test runs.

    Also those of loggers that were used first after another test had configured the log: they keep its list.
    """
    capture = LogCapture()
    capturing: Any = [structlog.contextvars.merge_contextvars, capture]
    earlier, kept = structlog.get_config()["processors"], list(logs._processors)
    structlog.configure(processors=capturing)
    logs._processors[:] = capturing
    yield capture.entries
    logs._processors[:] = kept
    structlog.configure(processors=earlier)
