"""Chat templates like those of well-known models, each with a small vocabulary and its control tokens."""

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from language.text.vocabularies import BYTES, CORPUS

# Qwen 2.5 and 3: system message, tools as JSON, tool results within a user's message, reasoning split off.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Llama 3: headers, trimmed contents, tools in the first user message.
LLAMA_3 = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions:\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson if message.content is mapping else message.content }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Mistral 7B v0.3: tokens in brackets, the system message before the last user message.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools %}{{- tool | tojson + ('' if loop.last else ', ') }}{%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system %}
            {{- '[INST]' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST]' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# Gemma 3: content parts are concatenated; the assistant's role is called `model`.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# Phi 3: the template joins its control tokens from parts and a role.
PHI_3 = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' + '\\n' }}{% endif %}"""

# DeepSeek R1: some control tokens are not marked as special and are matched in normalized text.
DEEPSEEK = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}{% endif %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Chat:
    """A template, the control tokens of its model, its plain added tokens, and the kind of its vocabulary.

    `joined_parts`: parts of control tokens in the template's source, which the template joins with a role.
    """

    template: str
    control: tuple[str, ...]
    plain: tuple[str, ...] = ()
    kind: str = "byte_level"
    bos_token: str | None = None
    eos_token: str | None = None
    has_tools: bool = False
    joined_parts: tuple[str, ...] = ()

    @property
    def named(self) -> dict[str, str]:
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: token for name, token in tokens.items() if token is not None}


CHATS = {
    "chatml": Chat(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        eos_token="<|im_end|>",
        has_tools=True,
    ),
    "llama_3": Chat(
        LLAMA_3,
        (
            *(
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eot_id|>",
            ),
            *(f"<|reserved_special_token_{number}|>" for number in range(20)),
        ),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        has_tools=True,
    ),
    "mistral": Chat(
        MISTRAL,
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        kind="metaspace",
        bos_token="<s>",
        eos_token="</s>",
        has_tools=True,
    ),
    "gemma": Chat(
        GEMMA,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        ("<table>", "\n\n"),
        kind="replaced_blanks",
        bos_token="<bos>",
        eos_token="<eos>",
    ),
    "phi_3": Chat(
        PHI_3,
        ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        kind="metaspace",
        eos_token="<|endoftext|>",
        joined_parts=("'<|'", "'|>'"),
    ),
    "deepseek": Chat(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        ("<think>", "</think>"),
        kind="unmarked",
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    ),
}


@cache
def chat_library(name: str, token_format: str = "{}") -> Library:
    """Return the Rust library's tokenizer of a chat.

    `token_format`: of its control tokens. In another format they keep their ids, and no text has them.
    """
    chat = CHATS[name]
    if chat.kind in ("byte_level", "unmarked"):
        tokenizer, is_in_model = _byte_level(), False
    else:
        tokenizer, is_in_model = _byte_fallback(chat, token_format), True
    if chat.kind == "metaspace":
        # As in newer files: a blank is added only at the very beginning of a text.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif chat.kind == "replaced_blanks":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    assert is_in_model or tokenizer.token_to_id(chat.control[0]) is None
    marked = chat.control if chat.kind != "unmarked" else chat.control[:2]
    # Phi's control tokens also match the blanks after them.
    tokenizer.add_tokens(
        [
            AddedToken(
                token_format.format(token),
                special=token in marked,
                normalized=token not in marked,
                rstrip=name == "phi_3",
            )
            for token in chat.control
        ]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in chat.plain])
    return tokenizer


def _byte_level() -> Library:
    tokenizer = Library(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # Parts of control tokens have merges, as in a vocabulary that was trained on web pages.
    tokenizer.train_from_iterator([*CORPUS, "<|im_ end|> <|", "|><| </s> _id|>", "}}\n\n{{"] * 3, trainer)
    return tokenizer


def _byte_fallback(chat: Chat, token_format: str) -> Library:
    words = [
        "▁",
        *"abcdefghilmnoprstuwxyz.,<>|/[]日本\n",
        "th",
        "▁th",
        "▁the",
        "▁▁",
        "el",
        "lo",
        "<|",
        "|>",
        "</",
        "s>",
    ]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "▁"), ("e", "l"), ("l", "o")]
    merges += [("<", "|"), ("|", ">"), ("<", "/"), ("s", ">")]
    control = [token_format.format(token) for token in chat.control]
    vocabulary = {token: token_id for token_id, token in enumerate([*control, *BYTES, *words])}
    tokenizer = Library(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
