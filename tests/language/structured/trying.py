"""Grammars as the server tries them before their jobs are queued."""

from fairlead.language.structured.trials import GrammarTrials

_trials = GrammarTrials()


def grammar_fault(grammar):
    """Return why a grammar is refused, None if it is not."""
    return _trials.run(grammar).fault
