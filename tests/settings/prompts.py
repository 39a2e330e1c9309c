"""Random prompts."""

from random import Random


def random_text(words: int, seed: int = 0) -> str:
    """Return a prompt of this many random words; equal seeds give equal prompts."""
    random = Random(seed)
    return " ".join(random.choice(["turn", "seat", "queue", "node", "line"]) for _ in range(words))
