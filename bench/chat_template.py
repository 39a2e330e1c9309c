"""The time of rendering a chat and of keeping its control tokens the template's, without the tokenizer.

    python bench/chat_template.py --json bench/results/chat_template.json

The thread that does it shares the GIL with all streams, so processor time counts: the best of many rounds.
Budget: 1 ms for 20 messages of 4 KB, 2 ms for one of 200 KB. `jinja_ms` is the time of rendering without
tracing what the template wrote.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.control_tokens import ControlTokens
from machine import loop_ns, machine

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {{- header + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
TOKENS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(248)),
)
SPECIAL = {"bos_token": "<|begin_of_text|>"}
WORDS = ("the", "quick", "fox", "<b>jumps</b>", "over", "x", "<", "y", "[0]", "{a:", "1}", "|", "b", "\n")
# Number of messages and characters of each.
SHAPES = {"20 of 4 KB": (20, 4096), "one of 200 KB": (1, 200_000), "500 of 100 B": (500, 100)}
ROUNDS = 50


def prose(chars: int) -> str:
    """Return a text as clients send it."""
    words = random.Random(chars).choices(WORDS, k=chars)
    return " ".join(words)[:chars]


def shortest_ms(call: Callable[[], Any]) -> float:
    """Return the processor time of a call in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return round(1e3 * min(times), 3)


def measure(contents: list[str]) -> dict[str, float]:
    """Return the times for messages with these contents."""
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]
    template, control = ChatTemplate(TEMPLATE, special_tokens=SPECIAL), ControlTokens(TOKENS)
    by_jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    names = {**SPECIAL, "messages": messages, "add_generation_prompt": True}
    return {
        "ms": shortest_ms(lambda: template.render(messages, control)),
        "rendering_ms": shortest_ms(lambda: template.render(messages)),
        "jinja_ms": shortest_ms(lambda: by_jinja.render(names)),
    }


def main() -> None:
    """Measure all shapes, and a message of nothing but control tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = {name: measure([prose(chars)] * number) for name, (number, chars) in SHAPES.items()}
    figures["200 KB of control tokens"] = measure(["<|eot_id|>" * 20_000])
    for name, times in figures.items():
        print(f"{name:26}", times)
    if options.json:
        report = {"machine": machine(), "loop_ns": round(loop_ns(), 1), "chats": figures}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
