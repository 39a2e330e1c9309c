"""OpenAI's routes that generate, and its list of models."""

import time
from typing import Any

import msgspec
from quart import Quart, Response, g

from fairlead.api import answers, prepare
from fairlead.api.call import Call, Reply, json_reply
from fairlead.api.edge import Edge
from fairlead.api.exchange import json_response
from fairlead.api.hot import Route
from fairlead.api.schemas import ChatCompletionRequest, CompletionRequest
from fairlead.text.model import TextModel

_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


class OpenAI:
    """`/v1/…`"""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._services = edge.services

    def generating(self) -> dict[str, Route]:
        """Return the routes that generate, by path: all are POST."""
        return {"/v1/chat/completions": self.chat, "/v1/completions": self.complete}

    def add_to(self, app: Quart) -> None:
        """Register the others."""
        app.add_url_rule("/v1/models", view_func=self.models, methods=["GET"])
        app.add_url_rule("/v1/models/<path:name>", view_func=self.model, methods=["GET"])

    async def chat(self, call: Call) -> Reply:
        """`POST /v1/chat/completions`."""
        wanted = await self._edge.read(call, _chat_decoder)
        model = self._edge.find_model(call, wanted.model)
        n = prepare.check_generation(wanted, prompts=1, sequences=self._services.config.limits.sequences)
        logprobs = prepare.chat_logprobs(wanted)
        tools = prepare.chat_tools(wanted)
        messages = prepare.template_messages(wanted.messages)
        prompt = await self._edge.encode(
            call, model.encode_chat, messages, tools=tools, variables=wanted.chat_template_kwargs
        )
        newer = wanted.max_completion_tokens is not None
        job = self._edge.job(
            call,
            wanted,
            model,
            kind="chatcmpl",
            prompts=(prompt,),
            sampling=prepare.sampling(
                wanted,
                model,
                longest_prompt=len(prompt),
                max_tokens=wanted.max_completion_tokens if newer else wanted.max_tokens,
                max_tokens_param="max_completion_tokens" if newer else "max_tokens",
                logprobs=logprobs,
            ),
            n=n,
            stop=prepare.stop_strings(wanted),
        )
        created = int(time.time())
        if job.stream:
            chunks = answers.ChatChunks(job, model.tokenizer, created=created, options=wanted.stream_options)
            return await self._edge.stream(call, job, chunks)
        whole, headers = await self._edge.whole(call, job)
        body = answers.chat_completion(job, whole, model.tokenizer, created=created)
        return json_reply(body, headers=headers)

    async def complete(self, call: Call) -> Reply:
        """`POST /v1/completions`."""
        wanted = await self._edge.read(call, _completion_decoder)
        model = self._edge.find_model(call, wanted.model)
        prepare.check_completion(wanted)
        prompts = prepare.completion_prompts(wanted.prompt)
        sequences = self._services.config.limits.sequences
        n = prepare.check_generation(wanted, prompts=len(prompts), sequences=sequences)
        encoded = await self._edge.encode(call, _encode_prompts, model, prompts)
        echo = await self._edge.encode(call, _decode_prompts, model, prompts) if wanted.echo else ()
        job = self._edge.job(
            call,
            wanted,
            model,
            kind="cmpl",
            prompts=encoded,
            sampling=prepare.sampling(
                wanted,
                model,
                longest_prompt=max(map(len, encoded)),
                max_tokens=wanted.max_tokens,
                logprobs=wanted.logprobs,
            ),
            n=n,
            stop=prepare.stop_strings(wanted),
        )
        created = int(time.time())
        if job.stream:
            chunks = answers.CompletionChunks(
                job, model.tokenizer, created=created, options=wanted.stream_options, echo=echo
            )
            return await self._edge.stream(call, job, chunks)
        whole, headers = await self._edge.whole(call, job)
        body = answers.completion(job, whole, model.tokenizer, created=created, echo=echo)
        return json_reply(body, headers=headers)

    async def models(self) -> Response:
        """`GET /v1/models`."""
        served = [_model_card(model) for model in self._edge.models(g.call)]
        return json_response({"object": "list", "data": served})

    async def model(self, name: str) -> Response:
        """`GET /v1/models/{id}`, by name or alias."""
        return json_response(_model_card(self._edge.find_model(g.call, name)))


def _model_card(model: TextModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "fairlead",
        "max_model_len": model.max_model_len,
    }


def _encode_prompts(model: TextModel, prompts: list[prepare.Prompt]) -> tuple[list[int], ...]:
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(model.encode_prompt(prompt))
        else:
            model.check_prompt(prompt)
            encoded.append(prompt)
    return tuple(encoded)


def _decode_prompts(model: TextModel, prompts: list[prepare.Prompt]) -> tuple[str, ...]:
    return tuple(prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in prompts)
