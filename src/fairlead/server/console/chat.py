"""`fairlead run`: answers one prompt, or holds a conversation. Owns the history and the terminal."""

import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fairlead.base.config import ConfigError
from fairlead.language.text.gguf_choice import is_gguf, model_name
from fairlead.server.console.announcer import DEFAULT_URL, report_error
from fairlead.server.console.client import Client, Message, NoServerError, ServerError
from fairlead.server.console.own_server import own_server

if TYPE_CHECKING:
    from fairlead.server.console.answer_view import AnswerView

# Names of models as served here, on the Hugging Face hub, in Ollama, and as files.
_MODEL_NAME = re.compile(r"[\w.:/@+~-]+", re.ASCII)
HELP = """\
/clear     clear the conversation
/thinking  show the reasoning of the last answer
/help      show this
/bye       end, as does Ctrl-D
Ctrl-C     stop the answer"""


def chat(*, model: str | None, prompt: str | None, url: str | None, api_key: str | None) -> int:
    """Answer a prompt, or hold a conversation. Return the exit code.

    model: the model's name. If it cannot be one, it is the prompt.
    prompt: what to answer; None: standard input, or a conversation if that is a terminal.
    url: the server; None: the default URL, or a new server if none answers there.
    api_key: the key for the server; None: it needs none.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not end the answer
    question = model if prompt is None and model is not None and _is_question(model) else None
    _check_prompt(prompt if question is None else question)
    try:
        with ExitStack() as servers:
            client, name = _connect(servers, None if question else model, prompt, url, api_key)
            if question is not None and question in client.models():
                name = question  # a served model may have any name
            elif question is not None:
                prompt = question
            if prompt is None and not sys.stdin.isatty():
                prompt = sys.stdin.buffer.read().decode(errors="replace")
                _check_prompt(prompt)
            if prompt is None:
                return _Conversation(client, name).run()
            _show_answer(client, name, [Message("user", _valid(prompt))])
            return 0
    except ServerError as error:
        report_error(str(error))
        return 1


def _check_prompt(prompt: str | None) -> None:
    if prompt is not None and not prompt.strip():
        raise ConfigError("PROMPT: must not be empty")


def _is_question(text: str) -> bool:
    """Return whether the text can be neither a model's name nor a directory: it has a space, for example."""
    return _MODEL_NAME.fullmatch(text) is None and not os.path.isdir(text)  # noqa: PTH112  # accepts any length


def _connect(
    servers: ExitStack, model: str | None, prompt: str | None, url: str | None, api_key: str | None
) -> tuple[Client, str]:
    """Return a client and the model's name on its server. Start a server only if `url` is None."""
    path = Path(model) if model and _is_model(Path(model)) else None
    name = model_name(path.resolve()) if path else model
    client = servers.enter_context(Client(url or DEFAULT_URL, api_key=api_key))
    try:
        served = client.models()
    except NoServerError as absent:
        if url is not None:
            raise
        if model and path is None:
            missing = f"{absent}, and {model} is not a directory of a model or a GGUF file"
            raise ServerError(missing + _or_question(model, prompt)) from None
        served = []
    if name in served or (name is None and served):
        return client, name or served[0]
    if url is None and (path or not served):
        return _connect_to_own(servers, path)
    if name is None:
        raise ServerError(f"{client.url} serves no model")
    try:
        client.check_model(name)
    except ServerError as error:
        raise ServerError(f"{error}{_or_question(name, prompt)}") from None
    return client, name


def _is_model(path: Path) -> bool:
    """Return whether there is a directory or a GGUF file, which a server of its own could serve."""
    return path.is_dir() or (is_gguf(path) and path.is_file())


def _or_question(model: str, prompt: str | None) -> str:
    """Return a hint on how to send a word that was taken as a model's name; empty if there is a prompt."""
    return "" if prompt is not None else f". If it is a question: fairlead run --prompt {shlex.quote(model)}"


def _connect_to_own(servers: ExitStack, path: Path | None) -> tuple[Client, str]:
    url, key = servers.enter_context(own_server(path))
    client = servers.enter_context(Client(url, api_key=key))
    return client, client.models()[0]


class _Conversation:
    """A conversation at a terminal, until the user ends it. An error in one turn does not end it."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._history: list[Message] = []
        self._reasoning = ""  # of the last answer

    def run(self) -> int:
        """Run the conversation; return the exit code."""
        import readline  # noqa: F401 - importing it gives `input` its editing keys and history

        print(f"Chatting with {self._model}. /help shows the commands, Ctrl-D ends.")
        while True:
            try:
                line = _valid(input("> ")).strip()
                if line == "/bye":
                    return 0
                self._take_turn(line)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\nCtrl-D or /bye ends.")
            except ServerError as error:
                report_error(str(error))

    def _take_turn(self, line: str) -> None:
        match line:
            case "":
                pass
            case "/help":
                print(HELP)
            case "/clear":
                self._history.clear()
                print("The conversation has been cleared.")
            case "/thinking":
                self._show_reasoning()
            case _ if line.startswith("/"):
                print(f"There is no {line.split(maxsplit=1)[0]}. /help shows the commands.")
            case _:
                self._ask(Message("user", line))

    def _ask(self, question: Message) -> None:
        """Send a question; add it and the answer to the history. Of a stopped answer, add the shown part."""
        from fairlead.server.console.answer_view import AnswerView

        view = AnswerView(hint=" (/thinking shows it)")
        try:
            _show_answer(self._client, self._model, [*self._history, question], view)
        except KeyboardInterrupt:
            print("\n(stopped)")
        self._reasoning = view.reasoning
        if view.text:
            self._history += question, Message("assistant", view.text)

    def _show_reasoning(self) -> None:
        from fairlead.server.console.answer_view import write_dimmed

        if self._reasoning:
            write_dimmed(self._reasoning)
        else:
            print("The last answer has no reasoning.")


def _show_answer(
    client: Client, model: str, messages: Sequence[Message], view: "AnswerView | None" = None
) -> None:
    """Show the answer as it arrives."""
    from fairlead.server.console.answer_view import AnswerView

    with view or AnswerView() as shown, client.answer(model, messages) as pieces:
        for piece in pieces:
            shown.add(piece)


def _valid(text: str) -> str:
    """Replace input bytes that were not UTF-8, which JSON cannot represent."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
