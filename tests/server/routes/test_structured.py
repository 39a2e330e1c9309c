"""The form of an answer's text: `response_format` and vLLM's `structured_outputs`."""

import json
import threading
import time

import pytest
import trio

from fairlead.base.config import Limits
from fairlead.language.structured.trials import GrammarTrials
from server.routes.conftest import client_of
from server.routes.written_answers import CHAT, COMPLETIONS, WEATHER, accepts, refusal, vocabulary_of

BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
GOOD, BAD = '{"city": "Oslo", "days": 3}', '{"town": "Oslo"}'
LARK = 'start: "yes" | "no" /[!]+/'
GBNF = 'root ::= "yes" | "no" mark\nmark ::= [!]+'
# What a request has, an answer that its grammar allows, and one that it does not.
CONSTRAINTS = [
    ({"response_format": {"type": "json_object"}}, '{"any": [1, null]}', "[1]"),
    ({"response_format": SCHEMA_FORMAT}, GOOD, BAD),
    ({"structured_outputs": {"json": WEATHER}}, GOOD, BAD),
    ({"structured_outputs": {"json": json.dumps(WEATHER)}}, GOOD, BAD),
    ({"structured_outputs": {"json": True}}, "[1]", "[1"),
    ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
    ({"structured_outputs": {"regex": "[ab]{2}/c?"}}, "ba/", "ba"),
    ({"structured_outputs": {"choice": ["red", 'bl"ue']}}, 'bl"ue', "green"),
    ({"structured_outputs": {"grammar": LARK}}, "no!!", "no"),
    ({"structured_outputs": {"grammar": GBNF}}, "no!!", "no"),
    ({"guided_json": WEATHER}, GOOD, BAD),
    ({"guided_json_object": True}, "{}", "[]"),
    ({"guided_regex": "[ab]{2}/c?", "guided_decoding_backend": "xgrammar"}, "ba/", "ba"),
    ({"guided_choice": ["red", 'bl"ue']}, 'bl"ue', "green"),
    ({"guided_grammar": GBNF}, "no!!", "no"),
]
UNCONSTRAINED = [
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"structured_outputs": None},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {}, "response_format": {"type": "text"}},
    {"guided_json_object": False, "guided_regex": "", "guided_choice": [], "guided_grammar": ""},
]


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


@pytest.fixture(scope="module")
def vocabulary(model):
    return vocabulary_of(model)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "allowed", "other"), CONSTRAINTS, ids=str)
async def test_constraint_becomes_the_grammar_of_the_job(
    client, model, vocabulary, path, fields, allowed, other
):
    reply = await client.post(path, BODIES[path] | fields)
    assert reply.status == 200, reply.body
    grammar = client.gateway.job.sampling.grammar
    assert accepts(model, vocabulary, grammar, allowed)
    assert not accepts(model, vocabulary, grammar, other)
    assert client.gateway.job.sampling.reasoning_limit is None


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", UNCONSTRAINED, ids=str)
async def test_text_without_a_form_has_no_grammar(client, path, fields):
    assert (await client.post(path, BODIES[path] | fields)).status == 200
    assert client.gateway.job.sampling.grammar is None


@pytest.mark.parametrize("strict", [True, False, None])
async def test_schema_is_obeyed_whether_strict_or_not(client, chat, model, vocabulary, strict):
    reply = await client.post(CHAT, chat(response_format=schema_format(WEATHER, strict=strict)))
    assert reply.status == 200
    assert not accepts(model, vocabulary, client.gateway.job.sampling.grammar, BAD)


async def test_every_choice_of_several_prompts_has_the_grammar(client):
    body = {"prompt": ["hello", "one two"], "n": 2, "response_format": SCHEMA_FORMAT}
    reply = await client.post(COMPLETIONS, body)
    assert (reply.status, len(reply.json["choices"])) == (200, 4)
    assert client.gateway.job.sampling.grammar is not None
    assert client.gateway.job.parts is None


DEEP = {"type": "integer"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}
AT = "response_format.json_schema.schema"
FAULTY_SCHEMAS = [
    ({"properties": {"a": {"not": {"type": "string"}}}}, f"{AT}.properties.a.not"),
    ({"properties": {"a": {"type": "xyz"}}}, f"{AT}.properties.a.type"),
    ({"items": {"anyOf": [{}, {"uniqueItems": True}]}}, f"{AT}.items.anyOf[1].uniqueItems"),
    ({"$defs": {"b": {"if": {}}}, "$ref": "#/$defs/b"}, f"{AT}.$defs.b.if"),
    ({"$ref": "#/$defs/b"}, f"{AT}.$ref"),
    ({"$ref": "#"}, f"{AT}.$ref"),
    ({"$ref": "https://example.com/schema"}, f"{AT}.$ref"),
    ({"properties": []}, f"{AT}.properties"),
    ({"enum": []}, f"{AT}.enum"),
    ({"properties": {"a": 5}}, f"{AT}.properties.a"),
    (DEEP, AT),
    ({"type": "string", "pattern": "(?=a)b"}, AT),
    ({"type": "string", "pattern": "["}, AT),
]


@pytest.mark.parametrize(("schema", "param"), FAULTY_SCHEMAS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", BODIES)
async def test_faulty_schema_is_refused_with_the_path_of_its_fault(client, path, schema, param):
    field, message = await refusal(client, path, BODIES[path] | {"response_format": schema_format(schema)})
    assert field is not None
    assert field.startswith(param)
    assert message.startswith(f"{field}: ")


async def test_path_of_a_fault_is_below_the_field_that_has_the_schema(client, chat):
    faulty = {"properties": {"a": {"not": {}}}}
    outputs = {"structured_outputs": {"json": faulty}}
    assert (await refusal(client, CHAT, chat(**outputs)))[0] == "structured_outputs.json.properties.a.not"
    outputs = {"structured_outputs": {"json": json.dumps(faulty)}}
    assert (await refusal(client, CHAT, chat(**outputs)))[0] == "structured_outputs.json.properties.a.not"


FAULTY_FIELDS = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, f"{AT}"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "grammar": LARK}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "7"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 10_000}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?<=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}, "response_format": SCHEMA_FORMAT}, "structured_outputs"),
    ({"response_format": SCHEMA_FORMAT, "min_tokens": 2}, "min_tokens"),
    ({"response_format": SCHEMA_FORMAT, "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), FAULTY_FIELDS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", BODIES)
async def test_faulty_constraint_is_refused_by_the_name_of_its_field(client, path, fields, param):
    field, message = await refusal(client, path, BODIES[path] | fields)
    assert field == param
    assert param in message


async def test_lenient_schema_may_have_keywords_that_are_not_supported(client, chat, model, vocabulary):
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    for fields in (
        {"response_format": schema_format(schema, lenient=True)},
        {"structured_outputs": {"json": schema, "lenient": True}},
    ):
        client.gateway.jobs.clear()
        reply = await client.post(CHAT, chat(**fields))
        assert reply.status == 200, reply.body
        grammar = client.gateway.job.sampling.grammar
        assert accepts(model, vocabulary, grammar, "[1, 1]")
        assert not accepts(model, vocabulary, grammar, '["a"]')
    client.gateway.jobs.clear()
    field, _ = await refusal(client, CHAT, chat(response_format=schema_format({"type": "x"}, lenient=True)))
    assert field == f"{AT}.type"


async def test_request_with_an_answer_that_may_not_end_is_allowed_without_a_form(client, chat):
    assert (await client.post(CHAT, chat(min_tokens=2, ignore_eos=True))).status == 200


async def test_equal_schemas_are_validated_once(client, chat, monkeypatch):
    checked, run = [], GrammarTrials.run
    monkeypatch.setattr(
        GrammarTrials, "run", lambda self, grammar, owner: (checked.append(grammar), run(self, grammar))[1]
    )
    for _ in range(3):
        assert (await client.post(CHAT, chat(response_format=SCHEMA_FORMAT))).status == 200
    await client.post(CHAT, chat(response_format=schema_format({"type": "integer"})))
    assert len(checked) == 2


BOMBS = {
    "multiples": {"allOf": [{"type": "integer", "multipleOf": multiple} for multiple in (9973, 9967)]},
    "memory": {"anyOf": [{"type": "integer", "multipleOf": 19_900 + number} for number in range(12)]},
    "length": {"type": "string", "maxLength": 100_000},
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("where", ["", ".properties.a"])
async def test_schema_that_takes_too_much_is_refused_with_its_path(client, chat, name, where):
    schema = BOMBS[name] if not where else {"type": "object", "properties": {"a": BOMBS[name]}}
    field, message = await refusal(client, CHAT, chat(response_format=schema_format(schema)))
    assert field.startswith(AT)
    assert message.startswith(field)
    assert "x-guidance" not in message
    assert client.gateway.jobs == []


async def test_fault_names_the_tool_whose_schema_takes_too_much(client, chat):
    schemas = [{"type": "object", "properties": {"a": schema}} for schema in ({}, BOMBS["memory"], {})]
    tools = [
        {"type": "function", "function": {"name": f"f{index}", "strict": True, "parameters": schema}}
        for index, schema in enumerate(schemas)
    ]
    field, _ = await refusal(client, CHAT, chat(tools=tools))
    assert field == "tools[1].function.parameters"


async def test_trials_of_one_tenant_do_not_delay_those_of_another(client, chat, monkeypatch):
    """The first tenant's trial goes on until the second one's is over, and its next one waits behind it."""
    waiting, run, order = threading.Event(), GrammarTrials.run, []

    def slow(trials, grammar, owner):
        if '"slow' in grammar:
            assert waiting.wait(20)
        order.append("slow" if '"slow' in grammar else "quick")
        return run(trials, grammar, owner)

    monkeypatch.setattr(GrammarTrials, "run", slow)
    async with trio.open_nursery() as nursery:
        for number in range(3):
            body = chat(response_format=schema_format({"const": f"slow{number}"}), user="many")
            nursery.start_soon(client.post, CHAT, body)
        await trio.sleep(0.05)
        reply = await client.post(CHAT, chat(response_format=schema_format({"const": "quick"}), user="one"))
        assert reply.status == 200
        waiting.set()
    assert order == ["quick", "slow", "slow", "slow"]


async def test_form_is_not_checked_for_a_client_that_leaves_before_its_turn(client, chat, monkeypatch):
    """Two forms of a tenant are tried; those behind them cost nothing until then. Other tenants go on."""
    waiting, run, call, checked = threading.Event(), GrammarTrials.run, GrammarTrials.call, []

    def slow(trials, grammar, owner):
        assert '"slow' not in grammar or waiting.wait(20)
        return run(trials, grammar, owner)

    def noted(trials, name, spec, *more, owner):
        checked.append(spec.answer.schema["const"])
        return call(trials, name, spec, *more, owner=owner)

    monkeypatch.setattr(GrammarTrials, "run", slow)
    monkeypatch.setattr(GrammarTrials, "call", noted)

    def request(const, user):
        return chat(response_format=schema_format({"const": const}), user=user)

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(client.post, CHAT, request(f"slow{number}", "many"))
        await trio.sleep(0.05)
        with trio.move_on_after(0.1):
            async with trio.open_nursery() as leaving:
                for number in range(2, 9):
                    leaving.start_soon(client.post, CHAT, request(f"slow{number}", "many"))
        assert (await client.post(CHAT, request("quick", "one"))).status == 200
        waiting.set()
    assert sorted(checked) == ["quick", "slow0", "slow1"]
    assert (await client.post(CHAT, request("again", "many"))).status == 200


async def test_trial_is_remembered_for_its_tenant_only(client, chat, monkeypatch):
    tried, run, formed, call = [], GrammarTrials.run, [], GrammarTrials.call

    def noted_run(trials, grammar, owner):
        tried.append(grammar)
        return run(trials, grammar, owner)

    def noted_call(trials, *arguments, owner):
        formed.append(arguments)
        return call(trials, *arguments, owner=owner)

    monkeypatch.setattr(GrammarTrials, "run", noted_run)
    monkeypatch.setattr(GrammarTrials, "call", noted_call)
    for schema in ({"type": "integer"}, BOMBS["memory"]):
        for user in ("ana", "bob", "ana", "bob"):
            await client.post(CHAT, chat(response_format=schema_format(schema), user=user))
    assert len(tried) == 4
    assert len(formed) == 6, "each form, and the parts of the faulty one"
    assert len(set(tried)) == 2
    assert all(job.sampling.grammar_bytes > 0 for job in client.gateway.jobs)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["x" * 16_000_000]},
        {"properties": {f"p{index}": {} for index in range(100_000)}},
        {"description": "x" * 14_000_000, "enum": [f"value {index}" for index in range(100_000)]},
    ],
    ids=["one text of 16 MB", "100,000 properties", "100,000 values"],
)
async def test_huge_schema_is_refused_soon(model, chat, schema):
    client = client_of(model)
    begin = time.perf_counter()
    field, _ = await refusal(client, CHAT, chat(response_format=schema_format(schema)))
    assert time.perf_counter() - begin < 10
    assert field.startswith(AT)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "tools"])
async def test_body_nested_ten_thousand_deep_is_refused(client, field):
    deep = b'{"properties":{"a":' * 10_000 + b"{}" + b"}}" * 10_000
    values = {
        "response_format": b'{"type":"json_schema","json_schema":{"name":"a","schema":%s}}',
        "structured_outputs": b'{"json":%s}',
        "tools": b'[{"type":"function","function":{"name":"f","parameters":%s}}]',
    }
    body = b'{"messages":[{"role":"user","content":"a"}],"%s":%s}' % (field.encode(), values[field] % deep)
    reply = await client.post(CHAT, body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert "nested too deeply" in reply.error["message"]
    assert len(body) < Limits().body_bytes


async def test_relayed_request_keeps_the_form_of_its_answer(relay_client):
    fields = {
        "response_format": schema_format({"not": {}}),
        "structured_outputs": {"json": "?", "regex": "("},
    }
    body = {"model": "remote", **BODIES[CHAT], **fields}
    assert (await relay_client.post(CHAT, body)).status == 200
    assert json.loads(relay_client.gateway.job.relay.body) == body


@pytest.mark.parametrize("place", ["", ".properties.a", ".$defs.b.items"])
async def test_schema_that_no_grammar_can_have_is_refused_with_its_path(client, chat, place):
    faulty = {"oneOf": [{"minimum": 1}, {"maximum": 2}]}
    schema = {
        "": faulty,
        ".properties.a": {"type": "object", "properties": {"x": {"multipleOf": 7}, "a": faulty}},
        ".$defs.b.items": {
            "type": "object",
            "properties": {"c": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"type": "array", "items": faulty}},
        },
    }[place]
    field, message = await refusal(client, CHAT, chat(response_format=schema_format(schema)))
    assert field == AT + place
    assert message.startswith(f"{field}: oneOf needs alternatives")


async def test_format_that_is_not_known_is_an_annotation(client, chat, model, vocabulary):
    schema = {
        "type": "object",
        "properties": {"file": {"type": "string", "format": "path"}},
        "required": ["file"],
    }
    for strict in (None, False, True):
        client.gateway.jobs.clear()
        reply = await client.post(CHAT, chat(response_format=schema_format(schema, strict=strict)))
        assert reply.status == 200, reply.body
        assert accepts(model, vocabulary, client.gateway.job.sampling.grammar, '{"file": "/etc"}')


async def test_text_longer_than_can_be_counted_is_refused_before_the_queue(client, chat):
    schema = {"type": "object", "properties": {"k0": {"type": "string", "maxLength": 10_000}}}
    field, message = await refusal(client, CHAT, chat(response_format=schema_format(schema)))
    assert field == f"{AT}.properties.k0"
    assert "8000 characters" in message
    assert client.gateway.jobs == []
