"""Constraints on the output that crashed a peer.

An unsupported constraint is answered by a 400 that names the field: an answer without it would be wrong.
A constraint that no server could serve, such as a schema of an unknown type, is refused in the same way. A
costly one is refused, or served within bounds; the canary shows that it harms no other request.
"""

import pytest

from advisories.target import CHAT, COMPLETIONS, Target, chat, completion
from advisories.tries import tries

NO_SCHEMAS = ['{"properties": {"reason": {"type": "stsring"}}}', {"type": "stsring"}, "{", [], 7]
NESTED = '{"type": "object", "properties": {"a": ' * 400 + '{"type": "string"}' + "}}" * 400
RECURSIVE = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
CATASTROPHIC = ["(a+)+b", "(" * 200 + "a*" + ")*" * 200, "(.{0,999}){999}"]
PICKLE = "gASVHgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu"


def schema_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@tries("CVE-2025-48942", "CVE-2026-105757")
@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=str)
def test_invalid_schema_is_refused(server: Target, schema):
    server.refuses_everywhere("response_format", schema_format(schema))
    server.refuses_everywhere("guided_json", schema)
    server.refuses_everywhere("structured_outputs", {"json": schema})


@tries("CVE-2025-48943")
@pytest.mark.parametrize("pattern", ["[invalid", "(", "*"])
def test_invalid_pattern_is_refused(server: Target, pattern):
    server.refuses_everywhere("guided_regex", pattern)
    server.refuses_everywhere("structured_outputs", {"regex": pattern})


@tries("CVE-2026-55574", "CVE-2026-73556")
def test_pattern_with_exponentially_many_states_is_refused_or_bounded(server: Target):
    for pattern in CATASTROPHIC:
        server.refuses_or_serves(structured_outputs={"regex": pattern})
        server.refuses_or_serves(guided_regex=pattern)


@tries("CVE-2026-2069", "CVE-2025-57809", "CVE-2026-25048", "CVE-2025-58446")
def test_endless_or_huge_grammar_is_refused_or_bounded(server: Target):
    enumeration = "root ::= " + " | ".join(f'"{number}"' for number in range(20_000))
    nested = "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000
    for grammar in ("root ::= root", "root ::= a\na ::= root", nested, enumeration):
        server.refuses_or_serves(guided_grammar=grammar)
        server.refuses_everywhere("grammar", grammar)
        server.refuses_or_serves(structured_outputs={"grammar": grammar})
    server.refuses_everywhere("structured_outputs", {"grammar": nested})
    server.refuses_everywhere("structured_outputs", {"grammar": enumeration})


@tries("CVE-2026-105757")
@pytest.mark.parametrize(
    "field", ["guided_json", "guided_regex", "guided_grammar", "guided_choice", "grammar"]
)
def test_empty_constraint_is_refused_or_ignored(server: Target, field):
    for empty in ("", [], {}):
        # Any object is a schema: {} allows all of JSON.
        if (field, empty) != ("guided_json", {}):
            server.refuses_or_ignores(**{field: empty})
        server.refuses_or_serves(structured_outputs={field.removeprefix("guided_"): empty})


@tries("CVE-2026-52130")
@pytest.mark.parametrize("schema", [RECURSIVE, NESTED], ids=["recursive", "nested"])
def test_recursive_or_deeply_nested_schema_is_refused_or_bounded(server: Target, schema):
    server.refuses_or_serves(response_format=schema_format(schema))
    server.refuses_or_serves(structured_outputs={"json": schema})
    server.refuses_everywhere("json_schema", schema)
    server.refuses_or_serves(guided_json=schema)


@tries("CVE-2026-52130", "CVE-2025-48944")
def test_schema_nested_deeper_than_a_parser_allows_is_refused(server: Target):
    deep = b"[" * 100_000 + b"]" * 100_000
    for field in (b"response_format", b"tools", b"json_schema"):
        body = b'{"messages": [{"role": "user", "content": "a"}], "' + field + b'": ' + deep + b"}"
        server.refuses(CHAT, body, None)


@tries("CVE-2025-48944")
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "something", "properties": {"a": {"type": "object"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": CATASTROPHIC[0]}}},
        {"type": 7, "properties": [], "required": {}},
        RECURSIVE,
    ],
    ids=str,
)
def test_tool_schema_is_treated_as_text_or_refused(server: Target, parameters):
    for strict in (False, True):
        function = {"name": "f", "parameters": parameters, "strict": strict}
        tools = [{"type": "function", "function": function}]
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            body = chat(tools=tools, tool_choice=choice)
            assert server.post(CHAT, body).status_code in {200, 400}
            if strict and parameters.get("type") in ("something", 7):
                server.refuses(CHAT, body, "tools[0].function.parameters.type")


@tries("CVE-2026-93989", "GHSA-6cxc-2vcg-w5qc", "CVE-2026-93840")
def test_token_restrictions_are_refused_and_affect_no_other_request(server: Target):
    server.refuses_everywhere("bad_words", ["owl", "x" * 10_000])
    server.refuses_everywhere("allowed_token_ids", [2**31 - 1])
    # This field could be supported. The canary shows that its mask does not remain in the batch.
    assert server.post(COMPLETIONS, completion(allowed_token_ids=[5])).status_code in {200, 400}


@tries("CVE-2024-11040")
def test_beam_search_is_refused(server: Target):
    server.refuses_everywhere("use_beam_search", True)


@tries(
    "CVE-2025-62164",
    "GHSA-mcmc-2m55-j8jj",
    "CVE-2026-56340",
    "CVE-2026-55514",
    "CVE-2026-73557",
    "GHSA-x9pq-jx6q-p3qv",
)
def test_embedded_prompts_are_refused(server: Target):
    for embeds in ("AAAA", ["AAAA"], PICKLE):
        part = {"type": "prompt_embeds", "prompt_embeds": embeds}
        server.refuses(CHAT, chat(content=[part, part]), "messages[0].content[0]")
        server.refuses(COMPLETIONS, completion(prompt_embeds=embeds, repetition_penalty=1.1), "prompt_embeds")
        server.refuses(CHAT, chat(prompt_embeds=embeds), "prompt_embeds")


@tries("CVE-2025-29770", "CVE-2025-32381", "GHSA-hf3c-wxg2-49q9")
def test_many_different_schemas_write_nothing_to_the_disk(server: Target, server_home):
    before = sorted(server_home.rglob("*"))
    for index in range(50):
        schema = {"type": "object", "properties": {f"field{index}": {"type": "string"}}}
        assert server.post(CHAT, chat(response_format=schema_format(schema))).status_code in {200, 400}
    assert sorted(server_home.rglob("*")) == before


@tries("CVE-2026-7304", "CVE-2026-10300")
@pytest.mark.parametrize(
    "fields",
    [
        {"custom_logit_processor": f'{{"callable": "{PICKLE}"}}'},
        {"logits_processors": ["os.system"]},
        {"lora_path": "../../etc", "lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "/"}},
    ],
    ids=str,
)
def test_code_and_adapters_of_a_request_are_refused_or_ignored(server: Target, fields):
    server.refuses_or_ignores(**fields)
