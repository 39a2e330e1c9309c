"""`POST /tokenize` and `/detokenize`, with vLLM's field names."""

import msgspec
from quart import Quart, Response, g

from fairlead.api import prepare
from fairlead.api.edge import Edge
from fairlead.api.exchange import json_response
from fairlead.api.schemas import DetokenizeRequest, TokenizeRequest

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Tokens:
    """Text to token ids and back, without generating."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        app.add_url_rule("/tokenize", view_func=self.tokenize, methods=["POST"])
        app.add_url_rule("/detokenize", view_func=self.detokenize, methods=["POST"])

    async def tokenize(self) -> Response:
        """`POST /tokenize`."""
        wanted = await self._edge.read(g.call, _tokenize_decoder)
        model = self._edge.find_model(g.call, wanted.model)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise prepare.refuse("prompt", "either prompt or messages must be given")
        if wanted.prompt is not None:
            tokens = await self._edge.encode(
                g.call,
                model.tokenizer.encode,
                wanted.prompt,
                add_special_tokens=wanted.add_special_tokens is not False,
                param="prompt",
            )
        else:
            messages = await self._edge.encode(g.call, prepare.template_messages, wanted.messages or [])
            tokens = await self._edge.encode(
                g.call,
                model.encode_chat,
                messages,
                tools=prepare.template_tools(wanted.tools),
                variables=wanted.chat_template_kwargs,
                add_generation_prompt=wanted.add_generation_prompt is not False,
            )
        token_strs = list(map(model.tokenizer.token, tokens)) if wanted.return_token_strs else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": model.max_model_len,
                "tokens": tokens,
                "token_strs": token_strs,
            }
        )

    async def detokenize(self) -> Response:
        """`POST /detokenize`."""
        wanted = await self._edge.read(g.call, _detokenize_decoder)
        model = self._edge.find_model(g.call, wanted.model)
        if wanted.tokens:
            prepare.check_token_ids(wanted.tokens, model, "tokens")
        prompt = await self._edge.encode(
            g.call, model.tokenizer.decode, wanted.tokens, skip_special_tokens=False
        )
        return json_response({"prompt": prompt})
