"""A vocabulary of a few tokens, and constraints over it."""

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from fairlead.language.structured.compiler import LIMITS, GrammarCompiler
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.grammar import LarkAnswer, answer_grammar
from fairlead.language.structured.vocabulary import token_vocabulary

TOKENS = [
    *(b"<end>", b"<tool>", b"a", b"b", b"c", b"ab", b"abc", b'"', b'"a', b'":', b"{", b"}", b"1", b"12"),
    *(
        "é".encode()[:1],
        "é".encode()[1:],
        "é".encode(),
        b"<",
        b"/t",
        b">",
        b"</t>",
        b" ",
        b"\n",
        b"",
        b"<tool>",
    ),
]
END, SPECIAL = 0, (0, 1)
WIDTH = 70  # of the logits: the ids after the tokens have no text
VOCABULARY = token_vocabulary(
    lambda token_id: TOKENS[token_id] if token_id < len(TOKENS) else b"",
    vocab_size=WIDTH,
    special_ids=SPECIAL,
    eos_token_ids=[END],
)


def id_of(text):
    return TOKENS.index(text if isinstance(text, bytes) else text.encode())


def lark(source):
    return answer_grammar(LarkAnswer(source))


def matcher(source):
    return LLMatcher(VOCABULARY, lark(source), log_level=0, limits=LIMITS)


def allowed_ids(constraint, width=WIDTH):
    """Return the ids that a constraint allows next."""
    mask = np.full(-(-width // 32), 0xDEAD_BEEF, np.uint32)
    constraint.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:width]).tolist())


def allowed(constraint):
    """Return the texts of the tokens that a constraint allows next."""
    return {TOKENS[token_id] for token_id in allowed_ids(constraint)}


def constrained(source, **more):
    return Constraint(matcher(source), **more)


def compiler(**more):
    return GrammarCompiler(VOCABULARY, **more)


def few_states(most):
    """Return the limits with so few states of a lexer that short texts reach them."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=most,
        max_grammar_size=30_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
