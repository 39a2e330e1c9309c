"""The text side of a model, for the parent process: vocabulary, chat template, limits, sampling defaults.

Read once from a local Hugging Face directory, and immutable. Does not read the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fairlead.config import ConfigError, SpecialTokens
from fairlead.errors import ContextLengthExceeded, InvalidRequest, LoadFailed
from fairlead.structured.instructions import explained
from fairlead.text.answer_format import AnswerFormat
from fairlead.text.chat_template import ChatTemplate, Message
from fairlead.text.control_tokens import ControlTokens
from fairlead.text.embedding import EmbeddingSettings, read_embedding
from fairlead.text.files import read_json, read_special_tokens
from fairlead.text.tokenizer import Tokenizer

_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Defaults of the sampling parameters of a request. The field names are OpenAI's and vLLM's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of one model. `max_model_len` in tokens, prompt + output; `created` in Unix time.

    `max_input_tokens` and `max_output_tokens` are the configuration's lower limits for a prompt and for one
    answer to it; None: no limit but the model's. `embedding`: the form of its embeddings; None if it
    generates text.

    `special_tokens`: whether a control token that a client spells in a chat remains text or is parsed.
    """

    name: str
    path: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    max_model_len: int
    defaults: GenerationDefaults
    created: int
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    embedding: EmbeddingSettings | None = None
    special_tokens: SpecialTokens = "text"
    answer_format: AnswerFormat | None = None
    _control: ControlTokens = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the search for control tokens, which takes milliseconds."""
        literals = () if self.chat_template is None else self.chat_template.literals
        object.__setattr__(self, "_control", ControlTokens(self.tokenizer.control_tokens, literals))

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str,
        max_model_len: int | None = None,
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        special_tokens: SpecialTokens = "text",
        wire_format: str | Mapping[str, Any] | None = None,
    ) -> "TextModel":
        """Read a model's directory. Raises `LoadFailed`, which names the invalid file.

        `max_model_len` lowers the model's limit. Raises `ConfigError` if it is above that, or if there is no
        such `wire_format`: the name of a known one, or a record of `structured.wire_format`.
        """
        if not path.is_dir():
            raise LoadFailed(f"{path} is not a directory")
        config_path = path / "config.json"
        config = read_json(config_path, _Config)
        generation_path = path / "generation_config.json"
        generation = read_json(generation_path, _Generation) if generation_path.exists() else _Generation()
        tokenizer = Tokenizer.load(path)
        chat_template = ChatTemplate.load(path)
        eos_token_ids = _eos_token_ids(path, config, generation, tokenizer)
        try:
            answer_format = AnswerFormat.find(path, chat_template, tokenizer, eos_token_ids, wire_format)
        except ValueError as error:
            raise ConfigError(f"wireFormat: {error}") from error
        return cls(
            name=name,
            path=path,
            tokenizer=tokenizer,
            chat_template=chat_template,
            eos_token_ids=eos_token_ids,
            max_model_len=_max_model_len(config_path, config, max_model_len),
            defaults=generation.defaults(),
            created=int(config_path.stat().st_mtime),
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            embedding=read_embedding(path),
            special_tokens=special_tokens,
            answer_format=answer_format,
        )

    @property
    def longest_prompt(self) -> int:
        """The maximum length of a prompt, in tokens."""
        longest = self.max_model_len - 1
        return longest if self.max_input_tokens is None else min(longest, self.max_input_tokens)

    def check_purpose(self, *, embed: bool) -> None:
        """Raise `InvalidRequest` (param `model`) if `embed` does not fit the purpose of the model."""
        if embed and self.embedding is None:
            raise InvalidRequest(f"the model {self.name} does not make embeddings", param="model")
        if self.embedding is not None and not embed:
            raise InvalidRequest(f"the model {self.name} makes embeddings, no text", param="model")

    def longest_answer(self, prompt_tokens: int) -> int:
        """Return the maximum number of tokens of an answer to a prompt of `prompt_tokens`."""
        remaining = self.max_model_len - prompt_tokens
        return remaining if self.max_output_tokens is None else min(remaining, self.max_output_tokens)

    def encode_prompt(
        self, text: str, *, special_tokens: SpecialTokens = "parse", param: str = "prompt"
    ) -> list[int]:
        """Return a completion prompt's ids. Raises `InvalidRequest` of `param` if it is too long or no text.

        A text that is far too long is refused at once; others cost up to a microsecond per character.
        Control tokens in it are parsed, because a raw prompt is often a chat that the client has rendered;
        with `special_tokens` "text" they remain text.
        """
        self._check_may_fit(text, param)
        ids = self.tokenize(text, special_tokens=special_tokens, param=param)
        self.check_prompt(ids, param=param)
        return ids

    def tokenize(
        self,
        text: str,
        *,
        special_tokens: SpecialTokens = "parse",
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[int]:
        """Return the ids of a text as `encode_prompt` does, but without a limit of length."""
        is_text = special_tokens == "text"
        return self.tokenizer.encode(
            self._control.broken(text) if is_text else text,
            add_special_tokens=add_special_tokens,
            with_breaks=is_text,
            param=param,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continuation: str = "",
    ) -> list[int]:
        """Return a chat's ids. Raises `InvalidRequest` as `encode_prompt`.

        `variables` are further variables of the template. `continuation` is the beginning of the answer,
        refused if the template begins the answer with its reasoning. The template writes the special tokens,
        so none are added. Those that a client spells remain text, unless `special_tokens` of the model is
        "parse".
        """
        if self.chat_template is None:
            raise InvalidRequest(f"the model {self.name} has no chat template", param="messages")
        if self.answer_format is not None and self.answer_format.detected.explains_tools:
            messages, tools = explained(messages, tools or ()), None
        variables = variables or {}
        if reserved := _RESERVED_VARIABLES & variables.keys():
            raise InvalidRequest(f"{min(reserved)} cannot be set", param="chat_template_kwargs")
        is_text = self.special_tokens == "text"
        text = self.chat_template.render(
            messages,
            self._control if is_text else None,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        if continuation:
            text += self._continuation(text, continuation)
        self._check_may_fit(text, "messages")
        ids = self.tokenizer.encode(text, add_special_tokens=False, with_breaks=is_text, param="messages")
        self.check_prompt(ids, param="messages")
        return ids

    def check_prompt(self, ids: Sequence[int], *, param: str = "prompt") -> None:
        """Raise `InvalidRequest` of `param` if there are no ids or too many, or one is out of vocabulary."""
        if not ids:
            raise InvalidRequest("the prompt is empty", param=param)
        if len(ids) > self.longest_prompt:
            raise self._too_long(f"this one has {len(ids)}", param)
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token ids of this model are 0...{self.tokenizer.vocab_size - 1}", param=param
            )

    def _continuation(self, text: str, continuation: str) -> str:
        """Return the beginning of an answer as it follows a rendered chat. Raises `InvalidRequest`."""
        if self.answer_format is not None and self.answer_format.opens_reasoning(text):
            reason = "the model's chat template begins an answer with reasoning, which cannot be skipped here"
            raise InvalidRequest(f"messages: {reason}; disable it to give the beginning", param="messages")
        return self._control.broken(continuation) if self.special_tokens == "text" else continuation

    def _check_may_fit(self, text: str, param: str) -> None:
        if not self.tokenizer.may_fit(text, self.longest_prompt):
            raise self._too_long(f"this one has {len(text)} characters", param)

    def _too_long(self, what: str, param: str) -> ContextLengthExceeded:
        if self.longest_prompt == self.max_input_tokens:
            return ContextLengthExceeded.of_input(self.max_input_tokens, what, param=param)
        return ContextLengthExceeded.of_prompt(self.max_model_len, what, param=param)


TokenIds = int | list[int] | None


class _Limits(msgspec.Struct):
    max_position_embeddings: int | None = None
    n_positions: int | None = None


class _Config(_Limits):
    """The fields read from config.json. A multimodal model has those of its text model in `text_config`."""

    eos_token_id: TokenIds = None
    text_config: _Limits | None = None

    def limit(self) -> int | None:
        parts = [self, self.text_config or _Limits()]
        limits = (limit for part in parts for limit in (part.max_position_embeddings, part.n_positions))
        return next((limit for limit in limits if limit is not None), None)


class _Generation(msgspec.Struct):
    """The fields read from generation_config.json."""

    eos_token_id: TokenIds = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def defaults(self) -> GenerationDefaults:
        """Return the sampling parameters of the file, unless they are for greedy decoding."""
        if self.do_sample is False:
            return GenerationDefaults()
        written = {name: getattr(self, name) for name in GenerationDefaults.__struct_fields__}
        return GenerationDefaults(**{name: value for name, value in written.items() if value is not None})


def _eos_token_ids(
    path: Path, config: _Config, generation: _Generation, tokenizer: Tokenizer
) -> frozenset[int]:
    written = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    ids = {written} if isinstance(written, int) else set(written or ())
    token = read_special_tokens(path).get("eos_token")
    if token is not None and (token_id := tokenizer.token_id(token)) is not None:
        ids.add(token_id)
    return frozenset(ids)


def _max_model_len(path: Path, config: _Config, requested: int | None) -> int:
    own = config.limit()
    if own is not None and requested is not None and requested > own:
        raise ConfigError(
            f"maxModelLen (--max-model-len): {requested} is above the model's own limit of {own} tokens, "
            f"which {path} gives; set it to {own} or less, or leave it out"
        )
    limits = [limit for limit in (own, requested) if limit is not None]
    if not limits:
        raise LoadFailed(f"{path} has no max_position_embeddings: set maxModelLen (--max-model-len)")
    if min(limits) < 2:
        raise LoadFailed(f"{path}: a limit of {min(limits)} tokens leaves no room for a prompt and an answer")
    return min(limits)
