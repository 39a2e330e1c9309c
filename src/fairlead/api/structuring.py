"""From the requested form of an answer to the grammar, the limits and the parts of a job."""

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from fairlead.api.body import invalid_field
from fairlead.api.dialects.dialect import GenerationRequest
from fairlead.job import AnswerParts, ReasoningLimit
from fairlead.structured.grammar import PLAIN, ReasoningState
from fairlead.structured.request import AnswerSpec, FaultyRequest
from fairlead.structured.trial_process import TrialResult
from fairlead.text.model import TextModel

MAX_REMEMBERED = 4096


class Structure(NamedTuple):
    """What a job needs so that its answer has the requested form. `grammar_field`: the grammar's source."""

    grammar: str | None = None
    grammar_field: str = ""
    reasoning_limit: ReasoningLimit | None = None
    parts: AnswerParts | None = None


def structure_of(request: GenerationRequest, model: TextModel, prompt: list[int]) -> Structure:
    """Return the structure of a request's answer. Pure. Raises `InvalidRequest`, which names the field."""
    spec, answer_format = request.answer, model.answer_format
    if not request.is_chat or answer_format is None:
        return Structure() if spec is None else Structure(*_grammar(spec, None, "closed"))
    wire_format = answer_format.wire_format
    state = answer_format.reasoning_at_the_end(prompt, model.tokenizer)
    grammar, field = (None, "") if spec is None else _grammar(spec, model, state)
    limit = None
    if request.reasoning_tokens is not None:
        limit = answer_format.reasoning_limit(request.reasoning_tokens, state, model.tokenizer)
    tools = spec.tools if spec is not None and wire_format.calls is not None else ()
    if not tools and wire_format.reasoning is None and wire_format.content is None:
        return Structure(grammar, field, limit)
    schemas = {tool.name: tool.parameters for tool in tools} if tools else None
    is_named = spec is not None and spec.named is not None
    return Structure(grammar, field, limit, AnswerParts(schemas, state == "opened", is_named))


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


def _grammar(spec: AnswerSpec, model: TextModel | None, state: ReasoningState) -> tuple[str | None, str]:
    answer_format = None if model is None else model.answer_format
    try:
        if answer_format is None:
            grammar = spec.grammar(PLAIN)
        else:
            grammar = spec.grammar(answer_format.wire_format, answer_format.special, state)
    except FaultyRequest as fault:
        raise invalid_field(fault.field, fault.reason) from fault
    return grammar, "tools" if spec.tools else spec.answer_field


def _digest(tenant: str, grammar: str) -> bytes:
    key = blake2b(tenant.encode(errors="surrogatepass"), digest_size=32).digest()
    return blake2b(grammar.encode(errors="surrogatepass"), digest_size=16, key=key).digest()
