"""OpenAI's generating routes, and its list of models."""

import time
from typing import Any

import msgspec

from fairlead.api import answers, chunks, prepare, unserved
from fairlead.api.encoding import encode_prompts
from fairlead.api.job_service import JobService
from fairlead.api.proxy import CHAT, COMPLETIONS, Proxy
from fairlead.api.request import Request, Response, json_response
from fairlead.api.schemas import ChatCompletionRequest, CompletionRequest
from fairlead.config import CommandConfig
from fairlead.text.model import TextModel

_chat_decoder = msgspec.json.Decoder(unserved.reading(ChatCompletionRequest, unserved.CHAT))
_completion_decoder = msgspec.json.Decoder(unserved.reading(CompletionRequest, unserved.COMPLETION))


class OpenAI:
    """The views of `/v1/chat/completions`, `/v1/completions` and `/v1/models`."""

    def __init__(self, edge: JobService, relaying: Proxy) -> None:
        self._edge = edge
        self._relaying = relaying
        self._services = edge.services
        self._began = int(time.time())

    async def chat(self, call: Request) -> Response:
        """Handle `POST /v1/chat/completions`."""
        body, addressed, name = await self._relaying.read(call)
        if (model := self._services.models.get(name)) is None:
            return await self._relaying.pass_on(call, CHAT, body, addressed, name)
        wanted = await self._edge.parse(call, body, _chat_decoder)
        model.check_purpose(embed=False)
        unserved.refuse_unserved(wanted, unserved.CHAT)
        n = prepare.check_generation(wanted, prompts=1, sequences=self._services.config.limits.sequences)
        logprobs = prepare.chat_logprobs(wanted)
        tools = prepare.chat_tools(wanted)
        messages = await self._edge.encode(call, prepare.template_messages, wanted.messages)
        prompt = await self._edge.encode(
            call, model.encode_chat, messages, tools=tools, variables=wanted.chat_template_kwargs
        )
        job = self._edge.job(
            call,
            wanted,
            name,
            kind="chatcmpl",
            prompts=(prompt,),
            sampling=prepare.sampling(
                wanted,
                model,
                shortest_prompt=len(prompt),
                max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prepare.prompt_logprobs(wanted, (prompt,), n),
            ),
            n=n,
            stop=prepare.stop_strings(wanted),
            relay=self._relaying.beside(name, CHAT, body, wanted),
        )
        created, options = int(time.time()), wanted.stream_options
        del body, addressed, wanted, messages, prompt  # this frame exists as long as the job
        if job.stream:
            writer = chunks.ChatChunks(job, model.tokenizer, created=created, options=options)
            return await self._relaying.stream(call, job, writer)
        return await self._relaying.whole(
            call, job, lambda whole: answers.chat_completion(job, whole, model.tokenizer, created=created)
        )

    async def complete(self, call: Request) -> Response:
        """Handle `POST /v1/completions`."""
        body, addressed, name = await self._relaying.read(call)
        if (model := self._services.models.get(name)) is None:
            return await self._relaying.pass_on(call, COMPLETIONS, body, addressed, name)
        wanted = await self._edge.parse(call, body, _completion_decoder)
        model.check_purpose(embed=False)
        unserved.refuse_unserved(wanted, unserved.COMPLETION)
        prepare.check_completion(wanted)
        prompts = await self._edge.encode(call, prepare.completion_prompts, wanted.prompt)
        limits = self._services.config.limits
        n = prepare.check_generation(wanted, prompts=len(prompts), sequences=limits.sequences)
        encoded = await self._edge.encode(
            call,
            encode_prompts,
            model,
            prompts,
            limits,
            "prompt",
            special_tokens=wanted.special_tokens or "parse",
        )
        echo = answers.NO_ECHO
        if wanted.echo:
            texts = await self._edge.encode(call, _decode_prompts, model, prompts)
            echo = answers.Echo(texts, alone=wanted.max_tokens == 0)
        job = self._edge.job(
            call,
            wanted,
            name,
            kind="cmpl",
            prompts=encoded,
            sampling=prepare.sampling(
                wanted,
                model,
                shortest_prompt=min(map(len, encoded)),
                max_tokens=wanted.max_tokens,
                logprobs=wanted.logprobs,
                prompt_logprobs=prepare.prompt_logprobs(wanted, encoded, n),
            ),
            n=n,
            stop=prepare.stop_strings(wanted),
            relay=self._relaying.beside(name, COMPLETIONS, body, wanted),
        )
        created, options = int(time.time()), wanted.stream_options
        lists_prompt = wanted.prompt_logprobs is not None
        del body, addressed, wanted, prompts, encoded
        if job.stream:
            writer = chunks.CompletionChunks(
                job, model.tokenizer, created=created, options=options, echo=echo
            )
            return await self._relaying.stream(call, job, writer)
        return await self._relaying.whole(
            call,
            job,
            lambda whole: answers.completion(
                job, whole, model.tokenizer, created=created, echo=echo, lists_prompt=lists_prompt
            ),
        )

    async def models(self, request: Request) -> Response:
        """Handle `GET /v1/models`."""
        offered = self._edge.offered(request)
        served = [self._card(status.model) for status in offered]
        if self._services.fleet.lists_aliases:
            served += [
                self._card(status.model) | {"id": alias} for status in offered for alias in status.aliases
            ]
        selectors = [self._blank_card(name) | card for name, card in self._edge.selecting.cards(request)]
        return json_response({"object": "list", "data": served + selectors})

    async def model(self, request: Request) -> Response:
        """Handle `GET /v1/models/{id}`, for a name, an alias or a selector."""
        name = request.path_parameters["name"]
        found = self._edge.find(request, name)
        if (card := self._edge.selecting.card(request, name)) is not None:
            return json_response(self._blank_card(name) | card)
        return json_response(self._card(found))

    def _card(self, name: str) -> dict[str, Any]:
        """Return a model's entry in the list, with more fields if its tokenizer is known here."""
        card = self._blank_card(name)
        if (model := self._services.models.get(name)) is not None:
            card |= {"created": model.created, "max_model_len": model.max_model_len}
            card["task"] = "generate" if model.embedding is None else "embed"
        config = self._services.fleet.configured(name)
        if isinstance(config, CommandConfig):
            card |= _described(config)
        return card

    def _blank_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "fairlead",
            "root": name,
            "parent": None,
        }


def _described(config: CommandConfig) -> dict[str, Any]:
    """Return the descriptive fields of a command's configuration, in llama-swap's format."""
    told = {
        "name": config.title,
        "description": config.description,
        "capabilities": config.capabilities,
        "meta": {"llamaswap": config.metadata} if config.metadata else None,
    }
    return {name: value for name, value in told.items() if value}


def _decode_prompts(model: TextModel, prompts: list[prepare.Prompt]) -> tuple[str, ...]:
    return tuple(prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in prompts)
