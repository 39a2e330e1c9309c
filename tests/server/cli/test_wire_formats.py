"""`fairlead config check FILE` names the wire format of each model, and what its template cannot take."""

import json

import pytest

from fairlead.server.cli import main
from language.text.chats import CHATS
from language.text.model_folders import write_folder

CALLS = {"tool_calls": {"open": "<c>", "close": "</c>", "content": "json"}, "content": {}}
RECORD = {"fields": {"thinking": {"open": "<r>", "close": "</r>"}, **CALLS}}

IGNORED = (
    "json, the default; tools are explained in a system message; "
    "its chat template writes calls as hermes, but ignores tools\n"
)


@pytest.mark.parametrize(
    ("settings", "template", "line"),
    [
        ({}, CHATS["chatml"].template, "hermes, from its chat template"),
        ({}, CHATS["llama_3"].template, "llama-3, from its chat template; no reasoning"),
        (
            {},
            CHATS["gemma"].template,
            "json, the default; no reasoning; tools are explained in a system message",
        ),
        (
            {},
            CHATS["chatml"].template.replace("tools", "no_tools"),
            IGNORED,
        ),
        ({"wireFormat": "mistral"}, CHATS["gemma"].template, "mistral, from wireFormat"),
        ({"wireFormat": {"fields": CALLS}}, "", "a record, from wireFormat; no reasoning"),
        ({"record": RECORD}, CHATS["chatml"].template, "a record, from its response_template"),
        (
            {"record": {"fields": {"thinking": {"open": ""}}}},
            CHATS["chatml"].template,
            "hermes, from its chat template; its response_template cannot be used: a mark must",
        ),
        ({}, "{{", "not known: "),
        ({"path": "organization/no-such-model"}, "", "not known, because the model is not on this machine"),
    ],
)
def test_wire_format_of_a_model_is_shown_with_its_source(
    tmp_path, capsys, monkeypatch, settings, template, line
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    record = {"response_template": settings.pop("record")} if "record" in settings else {}
    write_folder(tmp_path / "small", tokenizer_config={"chat_template": template, **record})
    models = {"qwen": {"path": "small", **settings}, "x": {"cmd": "x ${PORT}"}}
    file = tmp_path / "fairlead.yaml"
    file.write_text(json.dumps({"models": models}))
    assert main(["config", "check", str(file)]) == (2 if template == "{{" else 0)
    printed = capsys.readouterr().out
    assert f"\n  wire format of qwen: {line}" in printed
    assert "format of x" not in printed


REFUSING = """\
{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system') }}{%- endif %}
{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{%- endif %}
{{- m.role + m.content }}{%- for c in m.tool_calls %}{{ c | tojson }}{%- endfor %}
{%- endfor %}{%- for t in tools or [] %}{{ t.function.name + t.function.description }}{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATS["chatml"].template, []),
        (
            REFUSING,
            [
                "system messages become the beginning of the first user message",
                "calls are written one a message",
                "tools get an empty description",
            ],
        ),
    ],
)
def test_what_a_chat_template_cannot_take_is_shown(tmp_path, capsys, template, expected):
    write_folder(tmp_path / "small", tokenizer_config={"chat_template": template})
    file = tmp_path / "fairlead.yaml"
    file.write_text(json.dumps({"models": {"qwen": {"path": "small"}}}))
    assert main(["config", "check", str(file)]) == 0
    printed = capsys.readouterr().out
    assert (f"\n  chat template of qwen: {'; '.join(expected)}\n" in printed) == bool(expected)
    assert main(["config", "check", "--json", str(file)]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["wire_format"]["rewritten"] == expected
