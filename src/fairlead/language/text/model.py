"""The text side of a model, for the parent process: vocabulary, chat template, limits, sampling defaults.

Read once from a local Hugging Face directory, and immutable. Does not read the weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from fairlead.base.config import ConfigError, SpecialTokens
from fairlead.base.errors import ContextLengthExceeded, InvalidRequest, LoadFailed
from fairlead.language.checkpoint.checkpoint import CONFIG, open_checkpoint
from fairlead.language.structured.instructions import explained
from fairlead.language.text.answer_format import AnswerFormat
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.control_tokens import ControlTokens
from fairlead.language.text.embedding import EmbeddingSettings, read_embedding
from fairlead.language.text.end_tokens import read_end_tokens
from fairlead.language.text.infill import InfillTokens
from fairlead.language.text.scoring import ScoringSettings, read_scoring
from fairlead.language.text.settings import GenerationDefaults, read_settings
from fairlead.language.text.template_limits import Message, normalized
from fairlead.language.text.tokenizer import Tokenizer
from fairlead.language.text.truncation import Truncation, chars_for, is_enough

Task = Literal["generate", "embed", "score"]
_VERBS: Mapping[Task, str] = {
    "generate": "make text",
    "embed": "make embeddings",
    "score": "score pairs of texts",
}
TRUNCATED = "truncate_prompt_tokens"
# The second text of a pair is cut to this before it is encoded and cut to its tokens.
_PAIR_CHARS_PER_TOKEN = 32
# The end of a message that is continued while it is rendered. No client knows it.
_MARK = f"continued-{token_hex(16)}"
_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of one model.

    name: the model's name.
    path: its directory.
    tokenizer: its tokenizer.
    chat_template: its template; None: it has none.
    eos_token_ids: the tokens that end an answer.
    max_model_len: the most tokens of a sequence, prompt and output.
    defaults: the sampling parameters of requests without them.
    created: when its files were written, in Unix time.
    max_input_tokens: the configuration's lower limit for a prompt; None: no limit but the model's.
    max_output_tokens: the same for one answer.
    embedding: the form of its embeddings; None: it makes none.
    special_tokens: whether a control token that a client spells in a chat remains text or is parsed.
    close_at_limit: whether an answer with a form is closed when it nears its limit of tokens.
    answer_format: how it writes its answers.
    infill: the tokens for a text between two others; None: it has none.
    scoring: how it scores pairs of texts; None: it does not.
    network_vocab_size: how many token ids the network has; None if that is not known before it is loaded. A
        tokenizer may have more.
    ignored_end_tokens: tokens beyond these that were to end an answer.
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
    close_at_limit: bool = False
    answer_format: AnswerFormat | None = None
    infill: InfillTokens | None = None
    scoring: ScoringSettings | None = None
    network_vocab_size: int | None = None
    ignored_end_tokens: tuple[int, ...] = ()
    _control: ControlTokens = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the search for control tokens, which takes milliseconds."""
        object.__setattr__(self, "_control", ControlTokens(self.tokenizer.control_tokens))

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
        close_at_limit: bool = False,
        wire_format: str | Mapping[str, Any] | None = None,
    ) -> "TextModel":
        """Read a model's directory. Raises `LoadFailed`, which names the invalid file.

        path: the directory.
        name: the model's name.
        max_model_len: lowers the model's limit. Raises `ConfigError` if it is above that.
        max_input_tokens: the most tokens of a prompt.
        max_output_tokens: the most tokens of an answer.
        special_tokens: whether a control token that a client spells in a chat remains text or is parsed.
        close_at_limit: whether an answer with a form is closed when it nears its limit.
        wire_format: the name of a known one, or a record of `structured.wire_format`. Raises `ConfigError` if
            there is no such format.
        """
        config = open_checkpoint(path).document(CONFIG)
        if not config.is_file():  # first, as a folder that has none is not a model's
            raise LoadFailed(f"{config} is missing")
        tokenizer = Tokenizer.load(path)
        settings = read_settings(path, max_model_len=max_model_len)
        chat_template = ChatTemplate.load(path)
        scoring = read_scoring(path, chat_template)
        embedding = None if scoring is not None else read_embedding(path)
        generates = scoring is None and embedding is None
        size = settings.vocab_size
        # Embedding and scoring models end no answers, so their templates are not searched for an end.
        ends = read_end_tokens(path, tokenizer, chat_template if generates else None)
        try:
            answer_format = AnswerFormat.find(
                path, chat_template, tokenizer, ends.ids, wire_format, vocab_size=size
            )
        except ValueError as error:
            raise ConfigError(f"wireFormat: {error}") from error
        marks = {text: id_ for text, id_ in tokenizer.control_tokens.items() if size is None or id_ < size}
        return cls(
            name=name,
            path=path,
            tokenizer=tokenizer,
            chat_template=chat_template,
            eos_token_ids=ends.ids,
            ignored_end_tokens=ends.ignored,
            network_vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
            defaults=settings.defaults,
            created=settings.created,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            embedding=embedding,
            special_tokens=special_tokens,
            close_at_limit=close_at_limit,
            answer_format=answer_format,
            infill=InfillTokens.find(marks) if generates else None,
            scoring=scoring,
        )

    @property
    def vocab_size(self) -> int:
        """How many token ids both the tokenizer and the network have."""
        sizes = (self.tokenizer.vocab_size, self.network_vocab_size)
        return min(size for size in sizes if size is not None)

    @property
    def longest_prompt(self) -> int:
        """The maximum length of a prompt, in tokens."""
        longest = self.max_model_len - 1
        return longest if self.max_input_tokens is None else min(longest, self.max_input_tokens)

    @property
    def task(self) -> Task:
        """What the model makes: text, embeddings, or scores of pairs of texts."""
        return "embed" if self.embedding is not None else "generate" if self.scoring is None else "score"

    def check_purpose(self, *tasks: Task) -> None:
        """Raise `InvalidRequest` (param `model`) unless the model's task is one of these."""
        if self.task not in tasks:
            verbs = " or ".join(_VERBS[task] for task in tasks)
            raise InvalidRequest(f"the model {self.name} does not {verbs}", param="model")

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

    def encode_truncated(
        self,
        text: str,
        truncation: Truncation,
        *,
        special_tokens: SpecialTokens = "parse",
        param: str = "prompt",
    ) -> list[int]:
        """Return a prompt's ids as `encode_prompt`, cut if there are too many.

        The special tokens that the tokenizer adds are kept. Only a part of a long text is encoded.
        """
        most = self._truncated_length(truncation)
        beginning, end = self.tokenizer.frame()
        room = most - len(beginning) - len(end)
        if room < 1:
            reason = f"must be more than the {most - room} special tokens around a text"
            raise InvalidRequest(f"{TRUNCATED}: {reason}", param=TRUNCATED)
        chars = chars_for(room)
        while True:
            part = truncation.part(text, chars)
            ids = self.tokenize(part, special_tokens=special_tokens, add_special_tokens=False, param=param)
            is_whole = len(part) == len(text)
            if is_whole or is_enough(len(ids), room):
                break
            chars *= 2
        if is_whole and len(ids) <= room:
            return self.encode_prompt(text, special_tokens=special_tokens, param=param)
        ids = [*beginning, *truncation.cut(ids, room), *end]
        self.check_prompt(ids, param=param)
        return ids

    def truncate_ids(self, ids: list[int], truncation: Truncation, *, param: str = "prompt") -> list[int]:
        """Return the token ids of a prompt, cut if there are too many. Raises as `check_prompt` does."""
        ids = truncation.cut(ids, self._truncated_length(truncation))
        self.check_prompt(ids, param=param)
        return ids

    def encode_infill(self, prompt: str, suffix: str, *, special_tokens: SpecialTokens = "text") -> list[int]:
        """Return the ids of a prompt for the text between `prompt` and `suffix`, which may be empty.

        Control tokens in them remain text, unless `special_tokens` is "parse". Raises `InvalidRequest` as
        `encode_prompt`, and of `suffix` if the model has no tokens for this.
        """
        if self.infill is None:
            raise InvalidRequest("this model has no fill-in-the-middle tokens", param="suffix")
        self._check_may_fit(prompt, "prompt")
        self._check_may_fit(suffix, "suffix")
        is_text = special_tokens == "text"
        before = self.tokenize(prompt, special_tokens=special_tokens, add_special_tokens=False)
        after = self.tokenizer.encode_continuation(
            self._control.broken(suffix) if is_text else suffix, with_breaks=is_text, param="suffix"
        )
        ids = self.infill.prompt(self.tokenizer.beginning(), before, after)
        self.check_prompt(ids, param="suffix" if len(after) > len(before) else "prompt")
        return ids

    def encode_pair(self, first: str, second: str, *, fields: tuple[str, str]) -> list[int]:
        """Return the ids of two texts that are scored together; control tokens in them remain text.

        Raises `InvalidRequest` as `encode_prompt`; `fields`: the params of the two texts.
        """
        for text, field_ in zip((first, second), fields, strict=True):
            self._check_may_fit(text, field_)
        ids = self._pair(first, second, param=fields[1])
        self.check_prompt(ids, param=fields[1])
        return ids

    def encode_truncated_pair(
        self, first: str, second: str, truncation: Truncation, *, fields: tuple[str, str]
    ) -> list[int]:
        """Return the ids of two texts as `encode_pair` does, the second one cut if there are too many.

        Raises `InvalidRequest` of the first text if it leaves no room for the second.
        """
        most = self._truncated_length(truncation)
        self._check_may_fit(first, fields[0])
        second = truncation.part(second, _PAIR_CHARS_PER_TOKEN * most)
        while True:
            ids = self._pair(first, second, param=fields[1])
            excess = len(ids) - most
            if excess <= 0:
                self.check_prompt(ids, param=fields[1])
                return ids
            if not second:
                reason = f"leaves no room for {fields[1]} within {most} tokens"
                raise InvalidRequest(f"{fields[0]}: {reason}", param=fields[0])
            second = self._shortened(second, excess, truncation)

    def _shortened(self, text: str, excess: int, truncation: Truncation) -> str:
        """Return a text with about `excess` tokens less, and at least one character."""
        ends = self.tokenizer.token_ends(text)
        kept = len(text) // 2
        if len(ends) > excess:
            is_right = truncation.side == "right"
            kept = ends[len(ends) - excess - 1] if is_right else len(text) - ends[excess - 1]
        return truncation.part(text, min(kept, len(text) - 1))

    def _pair(self, first: str, second: str, *, param: str) -> list[int]:
        """Return the ids of two texts that are scored together. Raises `InvalidRequest` of `param`."""
        assert self.scoring is not None
        if self.scoring.uses_template:
            assert self.chat_template is not None
            try:
                text = self.chat_template.render(self.scoring.messages(first, second), self._control)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=param) from error
            return self.tokenizer.encode(text, add_special_tokens=False, with_breaks=True, param=param)
        first, second = map(self._control.broken, (first, second))
        return self.tokenizer.encode(first, second=second, with_breaks=True, param=param)

    def tokenize(
        self,
        text: str,
        *,
        special_tokens: SpecialTokens = "parse",
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[int]:
        """Return the ids of a text as `encode_prompt` does, but without a limit of length.

        text: the text.
        special_tokens: whether a control token in it remains text or is parsed.
        add_special_tokens: whether those that the tokenizer defines are added.
        param: the request's field with the text, for errors.
        """
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
        continues_last: bool = False,
    ) -> list[int]:
        """Return a chat's ids. Raises `InvalidRequest` as `encode_prompt`.

        messages: the messages.
        tools: the functions that may be called.
        add_generation_prompt: whether the beginning of an answer is added.
        variables: further variables of the template.
        continuation: the beginning of the answer, refused if the template begins the answer with its
            reasoning.
        continues_last: whether the text ends with that of the last message, and no answer begins.

        The template writes the special tokens, so none are added. Those that a client spells remain text,
        unless `special_tokens` of the model is "parse".
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            continuation=continuation,
            continues_last=continues_last,
        )
        self._check_may_fit(text, "messages")
        is_text = self.special_tokens == "text"
        text = self._control.broken(text) if is_text else text
        ids = self.tokenizer.encode(text, add_special_tokens=False, with_breaks=is_text, param="messages")
        self.check_prompt(ids, param="messages")
        return ids

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continuation: str = "",
        continues_last: bool = False,
    ) -> str:
        """Return the text that `encode_chat` encodes. Raises `InvalidRequest`."""
        if self.chat_template is None:
            raise InvalidRequest(f"the model {self.name} has no chat template", param="messages")
        if self.answer_format is not None and self.answer_format.detected.explains_tools:
            messages, tools = explained(normalized(messages), tools or ()), None
        variables = variables or {}
        if reserved := _RESERVED_VARIABLES & variables.keys():
            raise InvalidRequest(f"{min(reserved)} cannot be set", param="chat_template_kwargs")
        text = self.chat_template.render(
            _with_mark(messages) if continues_last else messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continues_last,
            **variables,
        )
        if continues_last:
            return _before_mark(text)
        if continuation:
            self._check_continuation(text)
            text += continuation
        return text

    def untraced_tokens(self) -> list[str]:
        """Return the control tokens that the chat template writes, but that stay text.

        The template writes them by an operation that is not traced, such as `'%s' % ...`. To find them, a
        short chat is rendered.
        """
        if self.chat_template is None or self.special_tokens == "parse":
            return []
        try:
            text = self.chat_template.render(
                [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
            )
        except InvalidRequest:  # such as a template for pairs of texts
            return []
        broken = self._control.broken(text)
        return [token for token in self.tokenizer.control_tokens if broken.count(token) != text.count(token)]

    def check_prompt(self, ids: Sequence[int], *, param: str = "prompt") -> None:
        """Raise `InvalidRequest` of `param` if there are no ids or too many, or one is out of vocabulary."""
        if not ids:
            raise InvalidRequest("the prompt is empty", param=param)
        if len(ids) > self.longest_prompt:
            raise self._too_long(f"this one has {len(ids)}", param)
        self.check_token_ids(ids, param=param)

    def check_token_ids(self, ids: Collection[int], *, param: str) -> None:
        """Raise `InvalidRequest` of `param` if the model has no token with one of these ids."""
        least, most = min(ids, default=0), max(ids, default=0)
        if least >= 0 and most < self.vocab_size:
            return
        wrong = least if least < 0 else most
        token = self.tokenizer.spelling(wrong)
        named = str(wrong) if token is None else f"{wrong} ({token})"
        raise InvalidRequest(
            f"the model has no token {named}; its ids are 0...{self.vocab_size - 1}",
            param=param,
        )

    def _truncated_length(self, truncation: Truncation) -> int:
        """Return the most tokens of a truncated prompt. Raises `InvalidRequest` for more than fit."""
        if truncation.tokens is None:
            return self.longest_prompt
        if truncation.tokens > self.longest_prompt:
            reason = f"a prompt of this model may have {self.longest_prompt} tokens"
            raise InvalidRequest(f"{TRUNCATED}: {reason}", param=TRUNCATED)
        return truncation.tokens

    def _check_continuation(self, text: str) -> None:
        """Raise `InvalidRequest` if the beginning of an answer cannot follow a rendered chat."""
        if self.answer_format is not None and self.answer_format.opens_reasoning(text):
            reason = "the model's chat template begins an answer with reasoning, which cannot be skipped here"
            raise InvalidRequest(f"messages: {reason}; disable it to give the beginning", param="messages")

    def _check_may_fit(self, text: str, param: str) -> None:
        if not self.tokenizer.may_fit(text, self.longest_prompt):
            raise self._too_long(f"this one has {len(text)} characters", param)

    def _too_long(self, what: str, param: str) -> ContextLengthExceeded:
        if self.longest_prompt == self.max_input_tokens:
            return ContextLengthExceeded.of_input(self.max_input_tokens, what, param=param)
        return ContextLengthExceeded.of_prompt(self.max_model_len, what, param=param)


def _with_mark(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a mark at the end of the last one's text. Raises `InvalidRequest` without text.

    A space follows the mark, by which `_before_mark` knows whether the template trims texts.
    """
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str) and content:
        last["content"] = f"{content}{_MARK} "
    elif isinstance(content, list) and content and content[-1].get("type") == "text":
        part = content[-1]
        last["content"] = [*content[:-1], {**part, "text": f"{part['text']}{_MARK} "}]
    else:
        reason = "continue_final_message needs a last message with a text"
        raise InvalidRequest(f"messages: {reason}", param="messages")
    return [*messages[:-1], last]


def _before_mark(text: str) -> str:
    """Return a rendered chat up to the mark, without the white space that the template would trim."""
    at = text.rfind(_MARK)
    if at < 0:
        reason = "the model's chat template does not show the last message's text"
        raise InvalidRequest(f"messages: {reason}, so it cannot be continued", param="messages")
    before = text[:at]
    return before if text[at + len(_MARK) :].startswith(" ") else before.rstrip()
