"""Orders of messages that a template refuses are changed to one that it accepts."""

import pytest

from fairlead.errors import InvalidRequest
from fairlead.text.chat_template import ChatTemplate

ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # noqa: E501
DROPS = "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501
TURNS = "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{{ m.reasoning }}{% endfor %}"  # noqa: E501
PARTS = TURNS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }};{% endfor %}")
NONE = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # noqa: E501


def message(role, content, **more):
    return {"role": role, "content": content, **more}


CHAT = [
    message("system", "A"),
    message("user", "b"),
    message("assistant", "c"),
    message("system", "D"),
    message("user", "e"),
]


def rendered(source, messages):
    return ChatTemplate(source).render(messages)


def test_order_that_the_template_accepts_is_kept():
    repeated = [*CHAT, message("user", "f"), message("assistant", "g"), message("assistant", "h")]
    expected = "<system>A<user>b<assistant>c<system>D<user>e<user>f<assistant>g<assistant>h"
    assert rendered(ANY, repeated) == expected


@pytest.mark.parametrize("source", [FIRST, DROPS])
def test_system_messages_are_merged_to_the_front(source):
    assert rendered(source, CHAT) == "<system>A\n\nD<user>b<assistant>c<user>e"
    assert rendered(source, CHAT[1:]) == "<system>D<user>b<assistant>c<user>e"
    assert rendered(source, CHAT[:3]) == "<system>A<user>b<assistant>c"


def test_template_without_system_messages_refuses_them_still():
    with pytest.raises(InvalidRequest, match="none"):
        rendered(NONE, CHAT)


def test_messages_of_a_role_in_a_row_are_merged():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        message("user", "a"),
        message("user", "b"),
        message("assistant", "c", reasoning="x"),
        message("assistant", None, tool_calls=[call], reasoning="y"),
        message("assistant", "", tool_calls=[call, call]),
        message("tool", "d"),
    ]
    assert rendered(TURNS, chat) == "<user>a\n\nb<assistant>c[f][f][f]x\n\ny<tool>d"


def test_results_in_a_row_are_not_merged():
    with pytest.raises(InvalidRequest, match="turns"):
        rendered(TURNS, [message("user", "a"), message("tool", "b"), message("tool", "c")])


def test_parts_of_merged_messages_remain_parts():
    part = {"type": "text", "text": "b"}
    chat = [message("user", "a"), message("user", [part, part]), message("assistant", "c")]
    assert rendered(PARTS, chat) == "<user>a;b;b;<assistant>c;"
    assert rendered(TURNS, chat) == "<user>a\nb\nb<assistant>c"


def test_merged_messages_are_not_changed_themselves():
    chat = [message("user", "a"), message("user", "b")]
    rendered(TURNS, chat)
    assert chat == [message("user", "a"), message("user", "b")]
