"""`POST /tokenize` and `/detokenize`, with vLLM's field names.

Both are bounded by the model's context and charged to the API key like a prompt. Long texts are encoded
in threads, which tenants use in turn.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import msgspec
import trio

from fairlead.base.config import Limits, SpecialTokens
from fairlead.base.errors import ContextLengthExceeded
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.fields import TemplateVariables, TokenId, describe_alternatives
from fairlead.dialects.llama_cpp.shapes import AppliedTemplate
from fairlead.dialects.openai.common import check_final_message
from fairlead.dialects.openai.messages import Messages, Tools, template_messages, template_tools
from fairlead.dialects.shapes import Detokenized, Tokenized
from fairlead.dialects.unread import known_fields, unread_fields, warning_of
from fairlead.dialects.unserved import TOKENIZE, Fields, capturing, refuse_unserved
from fairlead.generation.pipeline import USUAL_CHARS_PER_TOKEN
from fairlead.language.text.model import TextModel
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader

Body = TypeVar("Body", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a prompt, or messages as the chat template renders them.

    model: The model; None: the only one that the key may use.
    prompt: A text.
    special_tokens: Whether control tokens in the prompt are parsed (the default) or stay text.
    messages: A conversation instead of a prompt.
    tools: The tools that the model may call, for the chat template.
    chat_template_kwargs: Further variables of the chat template.
    add_special_tokens: Add the tokens with which the model's prompts begin and end, which is the default for
        a prompt.
    add_generation_prompt: End with the beginning of the model's answer, which is the default for messages.
    continue_final_message: End with the text of the last message, which an answer would continue.
    return_token_strs: Return the texts of the tokens, too.
    """

    model: str | None = None
    prompt: str | None = None
    special_tokens: SpecialTokens | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


DescribedTokenizeRequest = describe_alternatives(TokenizeRequest, {"prompt": "string"}, {"messages": "array"})


class ApplyTemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /apply-template`: messages that the chat template renders.

    model: The model; None: the only one that the key may use.
    messages: The conversation.
    tools: The tools that the model may call.
    chat_template_kwargs: Further variables of the chat template.
    add_generation_prompt: End with the beginning of the model's answer, which is the default.
    continue_final_message: End with the text of the last message, which an answer would continue.
    """

    model: str | None = None
    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class _Parsed(NamedTuple, Generic[Body]):
    """A parsed body, and the headers of its answer: a warning of fields that nothing reads."""

    body: Body
    headers: dict[str, str]


def _parser_of(kind: type[Body], refused: Fields) -> Callable[[bytes, Limits], _Parsed[Body]]:
    """Return the parser of bodies of this type."""
    parse, known = BodyParser(capturing(kind, refused) if refused else kind), known_fields(kind, refused)

    def read(body: bytes, limits: Limits) -> _Parsed[Body]:
        parsed = parse(body, limits)
        unread = unread_fields(body, known)
        return _Parsed(parsed, {"Warning": warning_of(unread)} if unread else {})

    return read


_parse_tokenize = _parser_of(TokenizeRequest, TOKENIZE)
_parse_template = _parser_of(ApplyTemplateRequest, {})
_parse_detokenize = _parser_of(DetokenizeRequest, {})


class Tokens:
    """The views that convert between text and token ids, without generation."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._jobs = reader.jobs

    async def tokenize(self, request: Request) -> Response:
        """Handle `POST /tokenize`."""
        _, (parsed, headers) = await self._reader.take(request, _parse_tokenize)
        caller = self._reader.identify(request)
        model = self._jobs.models.find_text(request.api_key, parsed.model)
        refuse_unserved(parsed, TOKENIZE)
        _check(parsed)
        chars = caller.body_bytes if parsed.prompt is None else len(parsed.prompt)
        estimate = chars // USUAL_CHARS_PER_TOKEN
        async with self._jobs.charge(caller, estimate, "prompt", is_estimate=True) as charge:
            body, tokens = await self._jobs.offload.in_turn(caller, _tokenize, model, parsed)
            charge.correct_prompt(tokens, trio.current_time())
        return json_response(body, headers=headers)

    async def apply_template(self, request: Request) -> Response:
        """Handle `POST /apply-template`."""
        _, (parsed, headers) = await self._reader.take(request, _parse_template)
        caller = self._reader.identify(request)
        model = self._jobs.models.find_text(request.api_key, parsed.model)
        check_final_message(
            add_generation_prompt=parsed.add_generation_prompt, continues=parsed.continue_final_message
        )
        estimate = caller.body_bytes // USUAL_CHARS_PER_TOKEN
        async with self._jobs.charge(caller, estimate, "messages", is_estimate=True):
            body = await self._jobs.offload.in_turn(caller, _rendered, model, parsed)
        return json_response(body, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        """Handle `POST /detokenize`."""
        _, (parsed, headers) = await self._reader.take(request, _parse_detokenize)
        caller = self._reader.identify(request)
        model = self._jobs.models.find_text(request.api_key, parsed.model)
        if len(parsed.tokens) > model.max_model_len:
            raise _too_long(model, f"{len(parsed.tokens)} tokens", "tokens")
        async with self._jobs.charge(caller, len(parsed.tokens), "tokens"):
            body = await self._jobs.offload.in_turn(caller, _detokenize, model, parsed.tokens)
        return json_response(body, headers=headers)


def _check(request: TokenizeRequest) -> None:
    """Raise `InvalidRequest` for fields that have no meaning for a prompt, or for messages."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid_field("prompt", "either prompt or messages must be given")
    check_final_message(
        add_generation_prompt=request.add_generation_prompt, continues=request.continue_final_message
    )
    if request.messages is not None and request.special_tokens is not None:
        reason = "only makes sense with prompt; for messages the model's setting holds"
        raise invalid_field("special_tokens", reason)
    if request.messages is not None and request.add_special_tokens:
        reason = "only makes sense with prompt; a chat template writes its own"
        raise invalid_field("add_special_tokens", reason)


def _tokenize(model: TextModel, request: TokenizeRequest) -> tuple[bytes, int]:
    """Return the response in JSON, and its number of tokens. Raises `InvalidRequest`."""
    if request.messages is not None:
        tokens = model.encode_chat(
            template_messages(request.messages),
            tools=template_tools(request.tools),
            variables=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt is not False,
            continues_last=bool(request.continue_final_message),
        )
    else:
        assert request.prompt is not None
        if not model.tokenizer.may_fit(request.prompt, model.max_model_len):
            raise _too_long(model, f"{len(request.prompt)} characters", "prompt")
        tokens = model.tokenize(
            request.prompt,
            special_tokens=request.special_tokens or "parse",
            add_special_tokens=request.add_special_tokens is not False,
        )
        if len(tokens) > model.max_model_len:
            raise _too_long(model, f"{len(tokens)} tokens", "prompt")
    texts = list(map(model.tokenizer.token, tokens)) if request.return_token_strs else None
    return _encode(Tokenized(len(tokens), model.max_model_len, tokens, texts)), len(tokens)


def _rendered(model: TextModel, request: ApplyTemplateRequest) -> bytes:
    """Return the response in JSON. Raises `InvalidRequest`.

    The special tokens that begin every prompt are left out, as in llama.cpp: /completion adds them.
    """
    text = model.render_chat(
        template_messages(request.messages),
        tools=template_tools(request.tools),
        variables=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt is not False,
        continues_last=bool(request.continue_final_message),
    )
    tokenizer = model.tokenizer
    beginning = "".join(tokenizer.spelling(token_id) or "" for token_id in tokenizer.beginning())
    return _encode(AppliedTemplate(str.__str__(text).removeprefix(beginning)))


def _detokenize(model: TextModel, tokens: list[int]) -> bytes:
    """Return the response in JSON. Raises `InvalidRequest`."""
    model.check_token_ids(tokens, param="tokens")
    return _encode(Detokenized(model.tokenizer.decode(tokens, skip_special_tokens=False)))


def _too_long(model: TextModel, what: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded.of_context(model.max_model_len, f"{what} do not fit", param=param)
