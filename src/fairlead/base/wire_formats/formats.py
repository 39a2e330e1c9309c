"""The wire formats of well-known model families, in the vocabulary of `wire_format`.

A new family is one record here, with the texts in its chat template that identify it (`probing`). The first
record that fits is used, so a special form comes before the general one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fairlead.base.wire_formats import wire_format
from fairlead.base.wire_formats.wire_format import Slip, WireFormat

_THINK = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


_TAGS = {
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*"},
    "transform": _NAMED,
}
_JSON_CALL = r'(?=\{\s*"name"\s*:\s*"[^"\n]+"\s*,\s*"arguments"\s*:\s*\{)'

# What models write instead of their own format; tests/language/structured/test_slips.py has the public
# reports.
_BARE_FUNCTION = wire_format.read_slip(
    {
        "open_pattern": r"\s*<function=(?P<name>[^>\n]+)>(?=\s*(?:<parameter=|</function>))",
        "close_pattern": r"\s*</function>(?:\s*</tool_call>)?",
        "repeats": True,
        **_TAGS,
    }
)
_TAGS_IN_CALL = wire_format.read_slip(
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>(?=\s*(?:<parameter=|</function>))",
        "close_pattern": r"\s*</function>(?:\s*</tool_call>)?",
        "repeats": True,
        **_TAGS,
    }
)
_JSON_IN_CALL = wire_format.read_slip(
    {
        "open_pattern": rf"\s*<tool_call>\s*{_JSON_CALL}",
        "close_pattern": r"\s*</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    }
)
_FENCE_IN_CALL = wire_format.read_slip(
    {
        "open_pattern": rf"\s*<tool_call>\s*```(?:json)?\s*{_JSON_CALL}",
        "close_pattern": r"\s*```(?:\s*</tool_call>)?",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    }
)
_IN_TOOLS = wire_format.read_slip(
    {
        "open_pattern": rf"\s*<tools>\s*{_JSON_CALL}",
        "close_pattern": r"\s*</tools>",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    }
)
_FENCED = wire_format.read_slip(
    {
        "open_pattern": rf"\s*```(?:json|tool_call)?\s*{_JSON_CALL}",
        "close_pattern": r"\s*```(?:\s*</tool_call>)?",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    },
    at_start=True,
)
_BARE_JSON = wire_format.read_slip(
    {
        "open_pattern": rf"\s*{_JSON_CALL}",
        "close_pattern": r"\s*</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": _FUNCTION,
    },
    at_start=True,
)
_MISTRAL_LIST = wire_format.read_slip(
    {
        "open_pattern": r'\s*\[TOOL_CALLS\]\s*(?=\[\s*\{\s*")',
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    }
)
_MISTRAL_NAMED, _MISTRAL_BARE = (
    wire_format.read_slip(
        {
            "open_pattern": rf"\s*\[TOOL_CALLS\]\s*(?P<name>[^\[{{\s]+){arguments}\s*(?=\{{)",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        }
    )
    for arguments in (r"(?:\[CALL_ID\]\w{1,32})?(?:\[ARGS\])?", "")
)
_IN_JSON = (_FENCE_IN_CALL, _TAGS_IN_CALL, _BARE_FUNCTION, _IN_TOOLS, _FENCED, _BARE_JSON)
_IN_TAGS = (_FENCE_IN_CALL, _JSON_IN_CALL, _BARE_FUNCTION, _FENCED, _BARE_JSON)


class FormatRecord(NamedTuple):
    """A `response_template`, and how it is recognized.

    name: the format's name.
    template: the record.
    shows: what a rendered call of the function `NAME` with the argument `KEY` has, in this order.
    slips: other ways in which such models write calls by mistake.
    """

    name: str
    template: dict[str, Any]
    shows: tuple[str, ...]
    slips: tuple[Slip, ...] = ()

    @property
    def wire_format(self) -> WireFormat:
        """The format of the record."""
        return replace(wire_format.read(self.name, self.template), slips=self.slips)


FORMATS = (
    FormatRecord(
        "qwen-xml",
        {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>\s*",
                    "close_pattern": r"\s*</function>\s*</tool_call>",
                    "repeats": True,
                    **_TAGS,
                },
                "content": {},
            }
        },
        ("<tool_call>", "<function=NAME>", "<parameter=KEY>", "</parameter>", "</function>", "</tool_call>"),
        _IN_TAGS,
    ),
    FormatRecord(
        "glm",
        {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    # Without what follows the name, any words after the mark would be a name.
                    "open_pattern": r"\s*<tool_call>(?P<name>[^<\n]+)\s*(?=<arg_key>|</tool_call>)",
                    "close_pattern": r"\s*</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": (
                            r"<arg_key>(?P<key>[^<\n]+)</arg_key>\s*"
                            r"<arg_value>(?P<value>.*?)</arg_value>\s*"
                        )
                    },
                    "transform": _NAMED,
                },
                "content": {},
            }
        },
        ("<tool_call>NAME", "<arg_key>KEY</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        (_JSON_IN_CALL, _FENCED, _BARE_JSON),
    ),
    FormatRecord(
        "hermes",
        {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": r"\s*<tool_call>\s*",
                    "close_pattern": r"\s*</tool_call>",
                    "repeats": True,
                    "content": "json",
                    "transform": _FUNCTION,
                },
                "content": {},
            }
        },
        ("<tool_call>", "NAME", "KEY", "</tool_call>"),
        _IN_JSON,
    ),
    FormatRecord(
        "gemma",
        {
            "fields": {
                "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
                "tool_calls": {
                    "open_pattern": r"\s*<\|tool_call>call:(?P<name>[\w.-]+)",
                    "close": "<tool_call|>",
                    "repeats": True,
                    "content": "json",
                    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                    "transform": _NAMED,
                },
                "content": {},
            }
        },
        ("<|tool_call>call:NAME{", "KEY:", "}<tool_call|>"),
    ),
    FormatRecord(
        "mistral",
        {
            "fields": {
                "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
                "tool_calls": {
                    "open_pattern": (r"\s*\[TOOL_CALLS\](?P<name>[^\[{\s]+)(?:\[CALL_ID\]\w{1,32})?\[ARGS\]"),
                    "repeats": True,
                    "content": "json",
                    "transform": _NAMED,
                },
                "content": {},
            }
        },
        ("[TOOL_CALLS]NAME", "[ARGS]"),
        (_MISTRAL_LIST, _MISTRAL_BARE),
    ),
    FormatRecord(
        "mistral-list",
        {
            "fields": {
                "tool_calls": {
                    "open_pattern": r"\s*\[TOOL_CALLS\]\s*",
                    "content": "json",
                    "transform_each": True,
                    "transform": {
                        "type": "function",
                        "function": {"name": "{name}", "arguments": "{arguments}"},
                    },
                },
                "content": {},
            }
        },
        ("[TOOL_CALLS]", "[{", "NAME"),
        (_MISTRAL_NAMED,),
    ),
    FormatRecord(
        "deepseek",
        {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": (
                        r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>"
                        r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
                    ),
                    "close_pattern": r"\n```<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
                    "repeats": True,
                    "content": "json",
                    "transform": _NAMED,
                },
                "content": {},
            }
        },
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>NAME", "```json", "<｜tool▁call▁end｜>"),
    ),
    FormatRecord(
        "deepseek-v3.1",
        {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": (
                        r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>"
                    ),
                    "close_pattern": r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
                    "repeats": True,
                    "content": "json",
                    "transform": _NAMED,
                },
                "content": {},
            }
        },
        ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    FormatRecord(
        "harmony",
        {
            "fields": {
                "reasoning_content": {
                    "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                    "close_pattern": r"<\|end\|>",
                },
                "tool_calls": {
                    "open_pattern": (
                        r"(?:<\|start\|>assistant)?"
                        r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+)"
                        r"| to=functions\.(?P<name>[\w.-]+)<\|channel\|>(?:commentary|analysis))"
                        r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
                    ),
                    "close": "<|call|>",
                    "content": "json",
                    "transform": _NAMED,
                },
                "content": {
                    "open_pattern": (
                        r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>"
                    ),
                    "close": ["<|end|>", "<|return|>"],
                },
            }
        },
        ("to=functions.NAME", "<|message|>"),
    ),
    FormatRecord(
        "llama-3",
        {
            "fields": {
                "tool_calls": {
                    "open_pattern": r'\s*(?:<\|python_tag\|>)?(?:;\s*)?(?=\{\s*"name")',
                    "repeats": True,
                    "content": "json",
                    "transform": {
                        "type": "function",
                        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                    },
                },
                "content": {},
            }
        },
        ('{"name": "NAME"', '"parameters":'),
    ),
)

GENERIC = FormatRecord(
    "json",
    {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*",
                "close_pattern": r"\s*</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION,
            },
            "content": {},
        }
    },
    (),
    _IN_JSON,
)
"""For templates that show no calls, or ignore tools: a system message explains it (`instructions`)."""

NAMES = tuple(record.name for record in (*FORMATS, GENERIC))


def configured(format_or_name: str | Mapping[str, Any]) -> WireFormat:
    """Return the known format of this name, or the format of a record. Raises ValueError."""
    if not isinstance(format_or_name, str):
        return wire_format.read("configured", format_or_name)
    for record in (*FORMATS, GENERIC):
        if record.name == format_or_name:
            return record.wire_format
    raise ValueError(f"there is no wire format {format_or_name}; known are {', '.join(NAMES)}")
