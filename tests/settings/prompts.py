"""Prompts that differ."""

from random import Random


def random_text(words: int, seed: int = 0) -> str:
    """Return a prompt of so many words."""
    random = Random(seed)
    return " ".join(random.choice(["turn", "seat", "queue", "node", "line"]) for _ in range(words))
