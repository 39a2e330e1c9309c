"""From the requested form of an answer to the grammar, the limits and the parts of a job."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

import trio

from fairlead.base.job import AnswerParts, ReasoningLimit
from fairlead.base.wire_formats.pattern import SpecialTokens
from fairlead.base.wire_formats.wire_format import WireFormat
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import GenerationRequest
from fairlead.generation.caller import Caller
from fairlead.generation.offload import Offload
from fairlead.language.structured.form_values import encode_values
from fairlead.language.structured.forming import Formed, field_of
from fairlead.language.structured.grammar import PLAIN, ReasoningState
from fairlead.language.structured.request import AnswerPart, AnswerSpec
from fairlead.language.structured.trial_messages import TrialResult
from fairlead.language.structured.trials import TrialRefused
from fairlead.language.text.model import TextModel

MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 32 * 1024 * 1024
MOST_ALONE_S = 16.0
"""How long the parts of an answer are tried alone, after the grammar of the whole was refused."""

Value = TypeVar("Value")


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


def structure_of(
    request: GenerationRequest, model: TextModel, prompt: Sequence[int], formed: Formed | None
) -> Structure:
    """Return the structure of an answer of this form; None: of any. Pure."""
    structure = Structure()
    if formed is not None:
        structure = Structure(formed.grammar, formed.field, warning="; ".join(formed.spec.warnings))
    answer_format = model.answer_format
    if not request.is_chat or answer_format is None:
        return structure
    wire_format = answer_format.wire_format
    state = answer_format.reasoning_at_the_end(prompt, model.tokenizer)
    limit = None
    if request.reasoning_tokens is not None:
        limit = answer_format.reasoning_limit(request.reasoning_tokens, state, model.tokenizer)
    spec = None if formed is None else formed.spec
    tools = spec.tools if spec is not None and wire_format.calls is not None else ()
    structure = structure._replace(reasoning_limit=limit)
    if not tools and wire_format.reasoning is None and wire_format.content is None:
        return structure
    schemas = {tool.name: tool.parameters for tool in tools} if tools else None
    is_named = spec is not None and spec.named is not None
    return structure._replace(parts=AnswerParts(schemas, state == "opened", is_named))


class Writing(NamedTuple):
    """How the model writes an answer: all that its grammar depends on besides its form.

    wire_format: How it marks reasoning and calls.
    special: Its special tokens.
    reasoning: Whether the prompt has begun its reasoning.
    """

    wire_format: WireFormat
    special: SpecialTokens | None
    reasoning: ReasoningState


def writing_of(request: GenerationRequest, model: TextModel, prompt: Sequence[int]) -> Writing:
    """Return how the model writes the answer to a prompt."""
    answer_format = model.answer_format
    if not request.is_chat or answer_format is None:
        return Writing(PLAIN, None, "closed")
    reasoning = answer_format.reasoning_at_the_end(prompt, model.tokenizer)
    return Writing(answer_format.wire_format, answer_format.special, reasoning)


def check_combinations(request: GenerationRequest, grammar: str | None) -> None:
    """Raise `InvalidRequest` for parameters that would keep the answer from ending where its grammar does."""
    if grammar is None:
        return
    if request.sampling.min_tokens:
        raise invalid_field("min_tokens", "cannot be combined with tools or a form of the answer")
    if request.sampling.ignore_eos:
        raise invalid_field("ignore_eos", "cannot be combined with tools or a form of the answer")


class Remembered(Generic[Value]):
    """Values for each tenant by what they were made of, the latest ones, of at most so many bytes together.

    A tenant that sent a form which takes too long gets the same error at once the next time. No tenant learns
    from the time that another has sent it.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def find(self, tenant: str, source: bytes) -> Value | None:
        """Return the value that was made of this, if it is remembered."""
        digest = _digest(tenant, source)
        found = self._values.get(digest)
        if found is None:
            return None
        self._values.move_to_end(digest)
        return found[0]

    def remember(self, tenant: str, source: bytes, value: Value, *, size: int = 0) -> None:
        """Remember a value that takes so many bytes."""
        digest = _digest(tenant, source)
        self._bytes += size - self._values.pop(digest, (value, 0))[1]
        self._values[digest] = value, size
        while len(self._values) > MAX_REMEMBERED or self._bytes > MAX_REMEMBERED_BYTES:
            _, (_, freed) = self._values.popitem(last=False)
            self._bytes -= freed


class StructureTrials:
    """Makes the structures of answers, and tries their grammars.

    Where a grammar is refused, its parts are tried alone: the text's form and each function's arguments. The
    request is refused for the first part that must be followed. Other functions at fault are relaxed. All
    results are remembered, so nothing is made or tried again when the tenant repeats its tools.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._formed: Remembered[Formed] = Remembered()
        self._divided: Remembered[tuple[AnswerSpec, tuple[AnswerPart, ...]]] = Remembered()
        self._tried: Remembered[TrialResult] = Remembered()

    async def structure(
        self, caller: Caller, generation: GenerationRequest, model: TextModel, prompt: Sequence[int]
    ) -> Structure:
        """Return the structure of a request's answer, with a grammar that compiles.

        Raises `InvalidRequest`, which names the field, and as `Offload.try_grammar` does.
        """
        if generation.answer is None:
            return await self._offload.encode(caller, structure_of, generation, model, prompt, None)
        writing = await self._offload.encode(caller, writing_of, generation, model, prompt)
        async with self._offload.form_in_turn(caller):
            formed, grammar_bytes = await self._form(caller, generation, writing)
        structure = await self._offload.encode(caller, structure_of, generation, model, prompt, formed)
        return structure._replace(grammar_bytes=grammar_bytes)

    async def _form(
        self, caller: Caller, generation: GenerationRequest, writing: Writing
    ) -> tuple[Formed, int]:
        """Return the form that is followed, and the memory of its grammar."""
        assert generation.answer is not None
        formed, tried = await self._try_form(caller, generation, generation.answer, writing)
        for relax in (self._relax_alone, self._relax_all):
            if tried.fault is None:
                break
            relaxed = await relax(caller, formed.spec, writing, tried.fault)
            if relaxed != formed.spec:
                formed, tried = await self._try_form(caller, generation, relaxed, writing)
        if tried.fault is not None:
            raise invalid_field(formed.field, tried.fault)
        return formed, tried.memory_bytes

    async def _try_form(
        self, caller: Caller, generation: GenerationRequest, spec: AnswerSpec, writing: Writing
    ) -> tuple[Formed, TrialResult]:
        """Make the grammar of a form, and try it. Raises `InvalidRequest` for a form that is not possible."""
        source = encode_values((spec, *writing))
        formed = self._formed.find(caller.tenant, source)
        if formed is None:
            try:
                formed = await self._offload.call(caller, "form", spec, *writing)
            except TrialRefused as refused:
                return Formed(spec, None, field_of(spec)), TrialResult(str(refused))
            size = 2 * len(source) + len(formed.grammar or "")
            self._formed.remember(caller.tenant, source, formed, size=size)
        if formed.fault is not None:
            raise invalid_field(formed.field, formed.fault)
        check_combinations(generation, formed.grammar)
        if formed.grammar is None:
            return formed, TrialResult()
        return formed, await self._result(caller, formed.grammar)

    async def _relax_alone(
        self, caller: Caller, spec: AnswerSpec, writing: Writing, fault: str
    ) -> AnswerSpec:
        """Return the form with those functions relaxed that are at fault by themselves, for `fault`."""
        wire_format, special = (writing.wire_format, writing.special) if spec.tools else (PLAIN, None)
        source = encode_values((spec, wire_format, special))
        if (divided := self._divided.find(caller.tenant, source)) is None:
            try:
                divided = await self._offload.call(caller, "divide", spec, wire_format, special)
            except TrialRefused:
                return spec.free_arguments(fault)
            size = 2 * len(source) + sum(len(part.grammar) for part in divided[1])
            self._divided.remember(caller.tenant, source, divided, size=size)
        spec, parts = divided
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
        self, _caller: Caller, spec: AnswerSpec, _writing: Writing, fault: str
    ) -> AnswerSpec:
        """Return the form with any object as arguments, where the schemas are too much only together."""
        return spec.free_arguments(fault)

    async def _result(self, caller: Caller, grammar: str) -> TrialResult:
        """Return the result of a trial, of an earlier one if there was one."""
        result = self._known(caller, grammar)
        if result is None:
            result = await self._offload.try_grammar(caller, grammar)
            self._tried.remember(caller.tenant, _encoded(grammar), result)
        return result

    def _known(self, caller: Caller, grammar: str) -> TrialResult | None:
        return self._tried.find(caller.tenant, _encoded(grammar))


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _digest(tenant: str, source: bytes) -> bytes:
    key = blake2b(_encoded(tenant), digest_size=32).digest()
    return blake2b(source, digest_size=16, key=key).digest()
