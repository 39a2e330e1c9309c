"""Arguments follow their schemas without `strict`; where that is not possible, a header says so."""

import json

import pytest

from fairlead.language.structured.trial_messages import TrialResult
from fairlead.language.structured.trials import GrammarTrials
from fairlead.server.auth.cors import EXPOSED
from server.routes.conftest import client_of, small_model
from server.routes.responses_client import running
from server.routes.test_structured import BOMBS
from server.routes.written_answers import CHAT, HERMES, SIMPLE, accepts, call, refusal, tool, vocabulary_of

# The prompt has only the tools' names: schemas may be longer than the context.
BRIEF = HERMES.replace("tools | tojson", "tools | map(attribute='function.name') | list")
HEADER = "x-fairlead-warning"
INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ODD = {**INTEGER, "not": {"required": ["x"]}}
# llguidance compiles no lookahead, which only a trial shows.
LOOKAHEAD = {**INTEGER, "properties": {**INTEGER["properties"], "s": {"type": "string", "pattern": "(?=a)b"}}}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), BRIEF)


@pytest.fixture(scope="module")
def vocabulary(hermes):
    return vocabulary_of(hermes)


@pytest.fixture
def client(hermes):
    return client_of(hermes)


@pytest.fixture(autouse=True)
def _time_for_all(monkeypatch):
    monkeypatch.setattr("fairlead.generation.structuring.MOST_ALONE_S", 1000)


@pytest.fixture
def tried(monkeypatch):
    """Return the grammars that were tried."""
    grammars, run = [], GrammarTrials.run

    def noted(trials, grammar, owner):
        grammars.append(grammar)
        return run(trials, grammar, owner)

    monkeypatch.setattr(GrammarTrials, "run", noted)
    return grammars


def bomb(name):
    return {"type": "object", "properties": {"n": {"type": "integer"}, "a": BOMBS[name]}, "required": ["n"]}


def possible(client, hermes, vocabulary, *calls):
    """Return whether the last job's grammar allows each of these calls: names and arguments."""
    grammar = client.gateway.jobs[-1].sampling.grammar
    return [accepts(hermes, vocabulary, grammar, call(name, json.dumps(one))) for name, one in calls]


FAULTY = {"keyword": ODD, "lookahead": LOOKAHEAD} | {name: bomb(name) for name in BOMBS}
CALLS = [("f", {"n": 1}), ("f", {}), ("f", {"n": "x"}), ("g", {"n": 1}), ("g", {})]


@pytest.mark.parametrize("name", FAULTY)
async def test_faulty_schema_relaxes_its_own_tool_and_no_other(client, hermes, vocabulary, chat, name, tried):
    tools = [tool("f", FAULTY[name]), tool("g", INTEGER)]
    for _ in range(2):
        reply = await client.post(CHAT, chat(tools=tools, tool_choice="required"))
        assert reply.status == 200, reply.body
        assert reply.headers[HEADER].startswith("tools[0].function.parameters")
        assert reply.headers[HEADER].endswith(" (the rest of the schema holds)")
        assert "tools[1]" not in reply.headers[HEADER]
        assert possible(client, hermes, vocabulary, *CALLS) == [True, False, False, True, False]
    assert len(tried) == len(set(tried)), "something was tried twice"


async def test_only_schema_at_fault_is_not_tried_again_by_itself(client, chat, tried):
    for _ in range(2):
        reply = await client.post(CHAT, chat(tools=[tool("f", bomb("memory"))]))
        assert (reply.status, HEADER in reply.headers) == (200, True)
    assert len(tried) == 2, "the schema, and what is left of it"


async def test_results_are_not_shared_between_tenants(client, chat, tried):
    for user in ("ana", "bob", "ana", "bob"):
        reply = await client.post(CHAT, chat(tools=[tool("f", LOOKAHEAD)], user=user))
        assert (reply.status, HEADER in reply.headers) == (200, True)
    assert len(tried) == 4
    assert len(set(tried)) == 2


async def test_strict_tool_is_refused_whatever_the_others_are(client, chat, tried):
    tools = [tool("loose", LOOKAHEAD), tool("g", INTEGER), tool("h", LOOKAHEAD, strict=True)]
    field, _ = await refusal(client, CHAT, chat(tools=tools))
    assert field.startswith("tools[2].function.parameters")
    assert not any("loose" in one for one in tried[1:]), "one that need not be followed was tried first"


async def test_form_of_the_text_is_refused_whatever_the_tools_are(client, chat):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": BOMBS["memory"]}}
    tools = [tool("f", LOOKAHEAD), tool("g", INTEGER)]
    field, _ = await refusal(client, CHAT, chat(tools=tools, response_format=form))
    assert field == "response_format.json_schema.schema"


async def test_schemas_that_are_too_much_together_are_relaxed_together(
    client, hermes, vocabulary, chat, monkeypatch
):
    tried, run = [], GrammarTrials.run

    def bounded(trials, grammar, owner):
        tried.append(grammar)
        is_large = "firstmark" in grammar and "secondmark" in grammar
        return TrialResult("both are too much") if is_large else run(trials, grammar, owner)

    monkeypatch.setattr(GrammarTrials, "run", bounded)
    properties = [{**INTEGER["properties"], f"{name}mark": {}} for name in ("first", "second")]
    schemas = [{**INTEGER, "properties": one, "additionalProperties": False} for one in properties]
    tools = [tool(f"f{index}", schema) for index, schema in enumerate(schemas)]
    tools.append(tool("g", INTEGER, strict=True))
    for _ in range(2):
        reply = await client.post(CHAT, chat(tools=tools, tool_choice="required"))
        assert reply.status == 200, reply.body
        assert reply.headers[HEADER].count("both are too much (any object is allowed)") == 2
        allowed = possible(client, hermes, vocabulary, ("f0", {}), ("f1", {}), ("g", {"n": 1}), ("g", {}))
        assert allowed == [True, True, True, False]
        assert len(tried) == 5, "all together, each alone, and what is left"


async def test_structural_bomb_leaves_any_object(client, hermes, vocabulary, chat):
    branches = [
        {"properties": {f"p{index}": {"const": index}}, "required": [f"p{index}"]} for index in range(3000)
    ]
    reply = await client.post(
        CHAT, chat(tools=[tool("f", {"anyOf": branches}), tool("g", INTEGER, strict=True)])
    )
    assert reply.status == 200, reply.body
    assert reply.headers[HEADER].endswith("(any object is allowed)")
    assert possible(client, hermes, vocabulary, ("f", {"x": 1}), ("g", {})) == [True, False]


async def test_without_time_the_rest_is_not_tried_but_served(client, chat, tried, monkeypatch):
    monkeypatch.setattr("fairlead.generation.structuring.MOST_ALONE_S", -1)
    tools = [tool("f", LOOKAHEAD), tool("g", INTEGER)]
    reply = await client.post(CHAT, chat(tools=tools))
    assert reply.status == 200
    assert reply.headers[HEADER].count("there was no time to try it") == 2
    assert len(tried) == 2


async def test_followed_schema_has_no_warning(client, chat):
    reply = await client.post(CHAT, chat(tools=[tool("f", INTEGER)]))
    assert (reply.status, HEADER in reply.headers) == (200, False)


async def test_tool_that_may_not_be_called_has_no_warning(client, chat):
    named = {"type": "function", "function": {"name": "g"}}
    tools = [tool("f", ODD), tool("g", INTEGER)]
    for choice in (named, "none"):
        reply = await client.post(CHAT, chat(tools=tools, tool_choice=choice))
        assert (reply.status, HEADER in reply.headers) == (200, False)


async def test_name_in_a_path_cannot_add_a_header(client, chat):
    name = 'é"\r\nX-Other: 1' + "x" * 5000
    schema = {"type": "object", "properties": {name: {"not": {}}}}
    reply = await client.post(CHAT, chat(tools=[tool("f", schema)]))
    assert reply.status == 200
    assert "X-Other" not in reply.headers
    assert r'\xe9"\r\nX-Other: 1xxx' in reply.headers[HEADER]
    assert len(reply.headers[HEADER]) < 1100


MESSAGES = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "f", "description": "It does f.", "parameters": ODD}
ROUTES = {
    CHAT: (
        {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        "function.parameters",
    ),
    "/v1/responses": ({"input": "hello", "tools": [{"type": "function", **FUNCTION}]}, "parameters"),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "f", "input_schema": ODD}]},
        "input_schema",
    ),
    "/api/chat": (
        {"model": "small", "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        "function.parameters",
    ),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_dialect_says_which_schema_is_not_followed(client, path, stream):
    fields, field = ROUTES[path]
    reply = await client.post(path, {**fields, "stream": stream})
    assert reply.status == 200, reply.body
    assert reply.headers[HEADER] == f"tools[0].{field}.not: is not supported (the rest of the schema holds)"


async def test_response_in_the_background_says_which_schema_is_not_followed(client, autojump_clock):
    fields, _ = ROUTES["/v1/responses"]
    async with running(client):
        reply = await client.post("/v1/responses", {**fields, "background": True})
    assert reply.headers[HEADER].startswith("tools[0].parameters.not: ")


def test_pages_may_read_the_warning():
    assert HEADER in EXPOSED.lower().split(", ")


async def test_template_without_tools_has_arguments_of_the_schema_too(tmp_path, chat):
    model = small_model(tmp_path, SIMPLE)
    client = client_of(model)
    reply = await client.post(CHAT, chat(tools=[tool("f", INTEGER)], tool_choice="required"))
    assert reply.status == 200, reply.body
    made = vocabulary_of(model)
    assert possible(client, model, made, *CALLS[:3]) == [True, False, False]
