"""From the requested form of an answer to the grammar, the limits and the parts of a job."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import trio

from fairlead.base.job import AnswerParts, ReasoningLimit
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import GenerationRequest
from fairlead.generation.caller import Caller
from fairlead.generation.offload import Offload
from fairlead.language.structured.grammar import PLAIN, ReasoningState
from fairlead.language.structured.request import AnswerSpec, FaultyRequest
from fairlead.language.structured.trial_process import TrialResult
from fairlead.language.text.model import TextModel

MAX_REMEMBERED = 4096
MOST_ALONE_S = 16.0
"""How long the parts of an answer are tried alone, after the grammar of the whole was refused."""


class Structure(NamedTuple):
    """What a job needs so that its answer has the requested form.

    grammar: The grammar; None: the answer may be any text.
    grammar_field: The field of the body that the grammar is from.
    grammar_bytes: The memory of the compiled grammar, as its trial has measured it.
    reasoning_limit: Of the tokens of the reasoning; None: no limit.
    parts: How the answer is divided; None: it is not.
    warning: Why the arguments of some tools do not follow their schemas; "": they do.
    """

    grammar: str | None = None
    grammar_field: str = ""
    grammar_bytes: int = 0
    reasoning_limit: ReasoningLimit | None = None
    parts: AnswerParts | None = None
    warning: str = ""


def with_checked_form(request: GenerationRequest) -> GenerationRequest:
    """Return a request with the form that is possible. Raises `InvalidRequest`, which names the field."""
    if request.answer is None:
        return request
    try:
        return msgspec.structs.replace(request, answer=request.answer.check())
    except FaultyRequest as fault:
        raise invalid_field(fault.field, fault.reason) from fault


def structure_of(request: GenerationRequest, model: TextModel, prompt: Sequence[int]) -> Structure:
    """Return the structure of a request's answer. Pure. Raises `InvalidRequest`, which names the field."""
    spec, answer_format = request.answer, model.answer_format
    if not request.is_chat or answer_format is None:
        return Structure() if spec is None else _of_grammar(spec, None, "closed")
    wire_format = answer_format.wire_format
    state = answer_format.reasoning_at_the_end(prompt, model.tokenizer)
    structure = Structure() if spec is None else _of_grammar(spec, model, state)
    limit = None
    if request.reasoning_tokens is not None:
        limit = answer_format.reasoning_limit(request.reasoning_tokens, state, model.tokenizer)
    tools = spec.tools if spec is not None and wire_format.calls is not None else ()
    structure = structure._replace(reasoning_limit=limit)
    if not tools and wire_format.reasoning is None and wire_format.content is None:
        return structure
    schemas = {tool.name: tool.parameters for tool in tools} if tools else None
    is_named = spec is not None and spec.named is not None
    return structure._replace(parts=AnswerParts(schemas, state == "opened", is_named))


def check_combinations(request: GenerationRequest, grammar: str | None) -> None:
    """Raise `InvalidRequest` for parameters that would keep the answer from ending where its grammar does."""
    if grammar is None:
        return
    if request.sampling.min_tokens:
        raise invalid_field("min_tokens", "cannot be combined with tools or a form of the answer")
    if request.sampling.ignore_eos:
        raise invalid_field("ignore_eos", "cannot be combined with tools or a form of the answer")


class TriedGrammars:
    """The results of trials of grammars, for each tenant, by the grammars' hashes; the latest ones.

    A tenant that sent a grammar which takes too long gets the same error at once the next time. No tenant
    learns from the time that another has sent it.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[bytes, TrialResult] = OrderedDict()

    def find(self, tenant: str, grammar: str) -> TrialResult | None:
        """Return the result of an earlier trial, if it is known."""
        digest = _digest(tenant, grammar)
        result = self._results.get(digest)
        if result is not None:
            self._results.move_to_end(digest)
        return result

    def remember(self, tenant: str, grammar: str, result: TrialResult) -> None:
        """Remember the result of a trial."""
        self._results[_digest(tenant, grammar)] = result
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)


class StructureTrials:
    """Makes the structures of answers, and tries their grammars.

    Where a grammar is refused, its parts are tried alone: the text's form and each function's arguments. The
    request is refused for the first part that must be followed. Other functions at fault are relaxed. All
    results are remembered, so nothing is tried again when the tenant repeats its tools.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._tried = TriedGrammars()

    async def structure(
        self, caller: Caller, generation: GenerationRequest, model: TextModel, prompt: Sequence[int]
    ) -> Structure:
        """Return the structure of a request's answer, with a grammar that compiles.

        Raises `InvalidRequest`, which names the field, and as `Offload.try_grammar` does.
        """
        if generation.answer is None:
            return await self._offload.encode(caller, structure_of, generation, model, prompt)
        async with self._offload.form_in_turn(caller):
            return await self._try_structure(caller, generation, model, prompt)

    async def _try_structure(
        self, caller: Caller, generation: GenerationRequest, model: TextModel, prompt: Sequence[int]
    ) -> Structure:
        generation = await self._offload.encode(caller, with_checked_form, generation)
        structure = await self._offload.encode(caller, structure_of, generation, model, prompt)
        check_combinations(generation, structure.grammar)
        if structure.grammar is None:
            return structure
        result = await self._result(caller, structure.grammar)
        for relax in (self._relax_alone, self._relax_all):
            if result.fault is None:
                break
            assert generation.answer is not None
            relaxed = await relax(caller, generation.answer, model, result.fault)
            if relaxed == generation.answer:
                continue
            generation = msgspec.structs.replace(generation, answer=relaxed)
            structure = await self._offload.encode(caller, structure_of, generation, model, prompt)
            assert structure.grammar is not None
            result = await self._result(caller, structure.grammar)
        if result.fault is not None:
            raise invalid_field(structure.grammar_field, result.fault)
        return structure._replace(grammar_bytes=result.memory_bytes)

    async def _relax_alone(
        self, caller: Caller, spec: AnswerSpec, model: TextModel, fault: str
    ) -> AnswerSpec:
        """Return the form with those functions relaxed that are at fault by themselves, for `fault`."""
        answer_format = model.answer_format
        wire_format, special = PLAIN, None
        if answer_format is not None and spec.tools:
            wire_format, special = answer_format.wire_format, answer_format.special
            spec = await self._offload.encode(caller, spec.fit, wire_format, special)
        parts = await self._offload.encode(caller, lambda: list(spec.parts(wire_format, special)))
        faults: dict[str, str] = {}
        give_up_s = trio.current_time() + MOST_ALONE_S
        for tool, field, grammar in parts:
            if len(parts) == 1:  # so the fault is known to be in it
                found: str | None = fault
            elif trio.current_time() > give_up_s and self._known(caller, grammar) is None:
                found = "there was no time to try it"
            else:
                found = (await self._result(caller, grammar)).fault
            if found is None:
                continue
            if tool is None:
                raise invalid_field(field, found)
            faults[tool] = found
        return spec.relax(faults)

    async def _relax_all(
        self, _caller: Caller, spec: AnswerSpec, _model: TextModel, fault: str
    ) -> AnswerSpec:
        """Return the form with any object as arguments, where the schemas are too much only together."""
        return spec.free_arguments(fault)

    async def _result(self, caller: Caller, grammar: str) -> TrialResult:
        """Return the result of a trial, of an earlier one if there was one."""
        result = self._known(caller, grammar)
        if result is None:
            result = await self._offload.try_grammar(caller, grammar)
            self._tried.remember(caller.tenant, grammar, result)
        return result

    def _known(self, caller: Caller, grammar: str) -> TrialResult | None:
        return self._tried.find(caller.tenant, grammar)


def _of_grammar(spec: AnswerSpec, model: TextModel | None, state: ReasoningState) -> Structure:
    """Return the structure with the grammar only. Tools are relaxed that the model's format cannot have."""
    answer_format = None if model is None else model.answer_format
    wire_format, special = PLAIN, None
    if answer_format is not None:
        wire_format, special = answer_format.wire_format, answer_format.special
    try:
        try:
            grammar = spec.grammar(wire_format, special, state)
        except FaultyRequest as fault:
            spec = spec.fit(wire_format, special)
            try:
                grammar = spec.grammar(wire_format, special, state)
            except FaultyRequest:
                spec = spec.free_arguments(fault.reason)
                grammar = spec.grammar(wire_format, special, state)
    except FaultyRequest as fault:
        raise invalid_field(fault.field, fault.reason) from fault
    field = "tools" if spec.tools else spec.answer_field
    return Structure(grammar, field, warning="; ".join(spec.warnings))


def _digest(tenant: str, grammar: str) -> bytes:
    key = blake2b(tenant.encode(errors="surrogatepass"), digest_size=32).digest()
    return blake2b(grammar.encode(errors="surrogatepass"), digest_size=16, key=key).digest()
