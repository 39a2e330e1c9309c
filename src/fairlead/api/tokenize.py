"""`POST /tokenize` and `/detokenize`, with vLLM's field names.

Both are bounded by the model's context and charged to the API key like a prompt. Long texts are encoded
in threads, which tenants use in turn.
"""

import msgspec
import trio

from fairlead.api import prepare, unserved
from fairlead.api.job_service import JobService
from fairlead.api.request import Request, Response, json_response
from fairlead.api.schemas import DetokenizeRequest, TokenizeRequest
from fairlead.errors import ContextLengthExceeded
from fairlead.text.model import TextModel

_tokenize_decoder = msgspec.json.Decoder(unserved.reading(TokenizeRequest, unserved.TOKENIZE))
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode

USUAL_CHARS_A_TOKEN = 4


class Tokens:
    """The views that convert between text and token ids, without generation."""

    def __init__(self, edge: JobService) -> None:
        self._edge = edge

    async def tokenize(self, call: Request) -> Response:
        """Handle `POST /tokenize`."""
        wanted = await self._edge.read(call, _tokenize_decoder)
        model = self._edge.find_model(call, wanted.model)
        unserved.refuse_unserved(wanted, unserved.TOKENIZE)
        prepare.check_tokenize(wanted)
        chars = call.body_bytes if wanted.prompt is None else len(wanted.prompt)
        estimate = chars // USUAL_CHARS_A_TOKEN
        with self._edge.charged(call, estimate, "prompt", is_estimate=True) as charge:
            body, tokens = await self._edge.in_turn(call, _tokenized, model, wanted)
            charge.correct_prompt(tokens, trio.current_time())
        return json_response(body)

    async def detokenize(self, call: Request) -> Response:
        """Handle `POST /detokenize`."""
        wanted = await self._edge.read(call, _detokenize_decoder)
        model = self._edge.find_model(call, wanted.model)
        if len(wanted.tokens) > model.max_model_len:
            raise _too_long(model, f"{len(wanted.tokens)} tokens", "tokens")
        with self._edge.charged(call, len(wanted.tokens), "tokens"):
            body = await self._edge.in_turn(call, _detokenized, model, wanted.tokens)
        return json_response(body)


def _tokenized(model: TextModel, wanted: TokenizeRequest) -> tuple[bytes, int]:
    """Return the response in JSON, and its number of tokens. Raises `InvalidRequest`."""
    if wanted.messages is not None:
        tokens = model.encode_chat(
            prepare.template_messages(wanted.messages),
            tools=prepare.template_tools(wanted.tools),
            variables=wanted.chat_template_kwargs,
            add_generation_prompt=wanted.add_generation_prompt is not False,
        )
    else:
        assert wanted.prompt is not None
        if not model.tokenizer.may_fit(wanted.prompt, model.max_model_len):
            raise _too_long(model, f"{len(wanted.prompt)} characters", "prompt")
        tokens = model.tokenize(
            wanted.prompt,
            special_tokens=wanted.special_tokens or "parse",
            add_special_tokens=wanted.add_special_tokens is not False,
        )
        if len(tokens) > model.max_model_len:
            raise _too_long(model, f"{len(tokens)} tokens", "prompt")
    answer = {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
        "token_strs": list(map(model.tokenizer.token, tokens)) if wanted.return_token_strs else None,
    }
    return _encode(answer), len(tokens)


def _detokenized(model: TextModel, tokens: list[int]) -> bytes:
    """Return the response in JSON. Raises `InvalidRequest`."""
    if tokens:
        prepare.check_token_ids(tokens, model, "tokens")
    return _encode({"prompt": model.tokenizer.decode(tokens, skip_special_tokens=False)})


def _too_long(model: TextModel, what: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded.of_context(model.max_model_len, f"{what} do not fit", param=param)
