"""`wireFormat` of a model in a configuration file."""

import json

import pytest

from fairlead.base.wire_formats.formats import NAMES

RECORD = {"fields": {"reasoning_content": {"open": "<r>", "close": "</r>"}, "content": {}}}


@pytest.mark.parametrize("said", ["llama-3", RECORD, None])
def test_wire_format_is_a_name_or_a_record(config, said):
    (model,) = config(f"models: {{m: {{path: small, wireFormat: {json.dumps(said)}}}}}").models
    assert model.wire_format == said


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("hermez", f"there is no wire format hermez; known are {', '.join(NAMES)}"),
        ("7", "must be text or a mapping, not a whole number"),
        ("{}", "Object missing required field `fields`"),
        (
            "{fields: {tool_calls: {open: <c>, content: yaml}}}",
            "tool_calls: content yaml is not supported",
        ),
    ],
)
def test_faulty_wire_format_is_refused(file, said, fault):
    assert file.faults(f"models: {{m: {{path: small, wireFormat: {said}}}}}") == [
        f"fairlead.yaml:1: models.m.wireFormat: {fault}"
    ]
