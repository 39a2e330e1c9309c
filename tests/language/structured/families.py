"""Chat templates with the marks of well-known model families, reduced to what their answers need."""

from typing import Any, NamedTuple

from fairlead.language.structured.grammar import ReasoningState


class Family(NamedTuple):
    """A template, the wire format that it has, and the state of the reasoning in its prompts.

    `states`: for the variables of the request, as JSON members. `special`: the marks that are special tokens.
    """

    template: str
    format: str
    states: tuple[tuple[dict[str, Any], ReasoningState], ...] = (({}, "closed"),)
    explains_tools: bool = False
    has_reasoning: bool = False


_CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
BODY
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}PROMPT{%- endif %}"""
_HERMES_CALLS = """\
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}"""
_QWEN3_CALLS = (
    """\
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
"""
    + _HERMES_CALLS
)
_XML_CALLS = """\
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}"""
_LLAMA = """\
{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + tools | tojson + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
_MISTRAL = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}CALLS{{- eos_token }}
{%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
_MISTRAL_LIST = """\
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if not call.id or call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']' }}"""
_MISTRAL_NAMED = """\
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + ID + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}"""
_GEMMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('order') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
_GEMMA_4 = """\
{%- macro written(value) %}
{%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{{- '{' }}
{%- for key, one in value | dictsort %}
{{- key + ':' + written(one) + ('' if loop.last else ',') }}
{%- endfor %}
{{- '}' }}
{%- else %}{{- value | tojson }}{%- endif %}
{%- endmacro %}
{%- if tools %}<|turn>system\n{% for tool in tools %}{{ written(tool) }}{% endfor %}<turn|>\n{% endif %}
{%- for message in messages %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' }}
{%- endfor %}{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}
{%- if not enable_thinking | default(true) %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}
{%- endif %}"""
_DEEPSEEK = """\
{{- bos_token }}{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.tool_calls %}{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}CALL{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- else %}
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}PROMPT{%- endif %}"""
# These concatenate the arguments, so they must be JSON text.
_R1_CALL = """\
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"""
_V3_1_CALL = """\
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}"""
_GLM = """\
[gMASK]<sop>{%- if tools %}<|system|>\n{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{%- if '</think>' in message.content %}{{- message.content.split('</think>')[-1] }}
{%- else %}{{- '<think></think>\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}
{%- endfor %}
{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}
{%- endif %}"""
_HARMONY = """\
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = (_: any) => any;' }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_NO_THINKING = "{%- if not enable_thinking | default(true) %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
_THINKING = "{{- '<think>\\n' }}"
_EITHER = """\
{%- if thinking is defined and thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif %}"""


def _chatml(body: str, prompt: str = "") -> str:
    return _CHATML.replace("BODY", body).replace("PROMPT", prompt)


def _deepseek(call: str, prompt: str = "") -> str:
    return _DEEPSEEK.replace("CALL", call).replace("PROMPT", prompt)


_SWITCH: tuple[tuple[dict[str, Any], ReasoningState], ...] = (
    ({}, "not opened"),
    ({"enable_thinking": False}, "closed"),
)
FAMILIES = {
    "Qwen2.5": Family(_chatml(_HERMES_CALLS), "hermes"),
    "Qwen3": Family(_chatml(_QWEN3_CALLS, _NO_THINKING), "hermes", _SWITCH, has_reasoning=True),
    "Qwen3-Thinking": Family(
        _chatml(_QWEN3_CALLS, _THINKING), "hermes", (({}, "opened"),), has_reasoning=True
    ),
    "Qwen3-Coder": Family(_chatml(_XML_CALLS), "qwen-xml"),
    "Qwen3.5": Family(
        _chatml(
            _XML_CALLS, _NO_THINKING + "{%- if enable_thinking | default(true) %}" + _THINKING + "{% endif %}"
        ),
        "qwen-xml",
        (({}, "opened"), ({"enable_thinking": False}, "closed")),
        has_reasoning=True,
    ),
    "Llama 3": Family(_LLAMA, "llama-3"),
    "Mistral v3": Family(_MISTRAL.replace("CALLS", _MISTRAL_LIST, 1), "mistral-list"),
    "Mistral v11": Family(
        _MISTRAL.replace("CALLS", _MISTRAL_NAMED.replace("ID", "'[CALL_ID]' + call.id")), "mistral"
    ),
    "Magistral": Family(
        "{{- '[SYSTEM_PROMPT]Think between [THINK] and [/THINK].[/SYSTEM_PROMPT]' }}"
        + _MISTRAL.replace("CALLS", _MISTRAL_NAMED.replace("ID", "''")),
        "mistral",
        (({}, "not opened"),),
        has_reasoning=True,
    ),
    "Gemma 3": Family(_GEMMA_3, "json", explains_tools=True),
    "Gemma 4": Family(_GEMMA_4, "gemma", _SWITCH, has_reasoning=True),
    "DeepSeek V3": Family(_deepseek(_R1_CALL), "deepseek", (({}, "not opened"),), has_reasoning=True),
    "DeepSeek R1": Family(_deepseek(_R1_CALL, _THINKING), "deepseek", (({}, "opened"),), has_reasoning=True),
    "DeepSeek V3.1": Family(
        _deepseek(_V3_1_CALL, _EITHER),
        "deepseek-v3.1",
        (({}, "closed"), ({"thinking": True}, "opened")),
        has_reasoning=True,
    ),
    "GLM-4.5": Family(_GLM, "glm", _SWITCH, has_reasoning=True),
    "gpt-oss": Family(_HARMONY, "harmony", (({}, "not opened"),), has_reasoning=True),
}
