"""Regular expressions of the package take linear time, and texts that were attacks elsewhere are answered."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead
from advisories.ambiguity import is_ambiguous
from advisories.target import CHAT, COMPLETIONS, HANG_S, HEAD, Target, chat, completion
from advisories.tries import tries

REDOS = (
    "CVE-2025-48887",  # vLLM
    "CVE-2025-71379",
    "CVE-2025-2099",  # transformers
    "CVE-2025-3263",
    "CVE-2025-3264",
    "CVE-2025-5197",
    "CVE-2025-6638",
)
# Texts that were slow to match in those projects, or are slow in a search for spaces, names or numbers.
TEXTS = {
    "pythonic tool call": "[A(A=\t)" + "A(A=\t),\t" * 3000 + "!",
    "lines": "\n" * 20_000 + "!",
    "spaces": " " * 20_000 + "!",
    "letters": "a" * 20_000 + "!",
    "digits": "1" * 20_000 + "!",
    "underscores": "/" + "_" * 20_000 + "!",
    "names": "config." * 3000 + "!",
    "tries": "try:" + " except" * 3000,
    "language codes": ">>" * 10_000 + "<",
    "brackets": "[[{{((" * 3000 + "!",
    "places": " - at `$." * 3000 + "\n",
    "events": "\r\r\n" * 7000 + "!",
}
FUNCTIONS = {"compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
HEADER_OF_SPACES = """
from fairlead.nodes.http.response_parser import InvalidResponse, ResponseParser
try:
    ResponseParser().feed(b"HTTP/1.1 200 OK\\r\\na:" + b" " * 60_000 + b"\\x00\\r\\n\\r\\n")
except InvalidResponse:
    print("refused")
"""


def expressions() -> dict[str, str | bytes]:
    """Return the literal regular expressions of the package by their location in the source."""
    source = Path(fairlead.__file__).parent
    found: dict[str, str | bytes] = {}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("re"), attr=name),
                    args=[ast.Constant(value=expression), *_],
                ) if name in FUNCTIONS:
                    found[f"{path.relative_to(source)}:{node.lineno}"] = expression
    return found


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+b",
        "(a*)*",
        "(a|aa)+b",
        "a*a*b",
        r"(\w+\s?)*!",
        r"[ \t]*([^\r\n]*?)[ \t]*",
        r"config\.(.*)\.(.*)\.json",
        r"\s*try\s*:.*?except.*?:",
        r"([a-zA-Z]+\w*\(([a-zA-Z]+\w*=.*,\s*)*([a-zA-Z]+\w*=.*\s)?\),\s*)*",
    ],
)
def test_analysis_finds_expressions_that_were_slow_in_other_projects(expression):
    assert is_ambiguous(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "a+b",
        "(ab)*",
        "(a+b)+",
        "a*b*",
        "a*?b",
        r"(?:\d+(?:\.\d+)?(?:ms|s))+",
        "(?>a*)a*",
        "[^,]*(,[^,]*)*",
        "a{1,63}b",
    ],
)
def test_analysis_accepts_linear_expressions(expression):
    assert not is_ambiguous(expression)


@tries(*REDOS)
def test_no_expression_of_the_package_is_ambiguous():
    found = expressions()
    assert len(found) > 20
    assert {location: expression for location, expression in found.items() if is_ambiguous(expression)} == {}


@tries(*REDOS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_that_was_slow_to_match_in_other_projects_is_answered(server: Target, text):
    tools = [{"type": "function", "function": {"name": "f", "description": text[:1000], "parameters": {}}}]
    for path, body in (
        ("/tokenize", {"prompt": text}),
        (CHAT, chat(content=text, tools=tools)),
        (COMPLETIONS, completion(prompt=text, stop=text[-50:])),
    ):
        assert server.post(path, body).status_code in {200, 400}
    server.refuses(CHAT, chat(tools=[{"type": text}]), None)
    server.refuses(CHAT, chat(**{text: 1}, temperature=text), "temperature")


@tries("CVE-2026-22778", "CVE-2026-54236", "CVE-2026-73555")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_error_names_a_field_of_the_request_in_a_short_quote(server: Target, text):
    for path, body, field in (
        (CHAT, {"messages": [{"role": text, "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": text, "content": "a"}], text: text}, "messages[0].role"),
        ("/v1/embeddings", {"input": "a", "encoding_format": text}, "encoding_format"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {text: 1}}, "logit_bias"),
    ):
        answer = server.refuses(path, body, None)
        assert answer.json()["error"]["param"] == field
        assert len(answer.content) < 1500


@tries("CVE-2025-71379", "CVE-2025-48956")
@pytest.mark.parametrize("filling", [b" ", b"\t", b" a", b"a", b",", b"\xff"], ids=ascii)
def test_no_line_of_a_request_takes_much_processor_time(server: Target, filling):
    value = filling * (30_000 // len(filling))
    get = f"GET /health {HEAD}".encode()
    post = f"POST /tokenize {HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    for data in (
        get + b"X-Header: " + value + b"\x00\r\n\r\n",
        get + b"X-Header: a" + value + b"\x0b\r\n\r\n",
        get + b"X-Header: " + value + b"\r\r\n\r\n",
        post + b"0\r\nX-Trailer: " + value + b"\x00\r\n\r\n",
        post + b"5;" + value + b"\n\r\nhello\r\n0\r\n\r\n",
    ):
        before_s = server.cpu_s()
        assert server.raw(data).status == 400
        # A matcher that reads the line once needs milliseconds of processor time, however busy the machine
        # is. One that reads the whole line again for each of its bytes takes several seconds.
        assert server.cpu_s() - before_s < 1


@tries("CVE-2025-71379")
def test_node_header_that_is_slow_to_match_is_refused():
    ended = subprocess.run(
        [sys.executable, "-c", HEADER_OF_SPACES], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.stdout == "refused\n", re.sub(r"\s+", " ", ended.stderr)
