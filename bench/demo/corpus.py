"""Generate the conversations that the demonstration model is trained on.

Facts about Fairlead come from facts.toml, all other questions from exercises.py. A seed gives the same corpus
on every machine.
"""

import re
import tomllib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from exercises import EXERCISES, LISTS, Pair, copy, invented_text, sum_or_difference

Message = dict[str, str]


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file in this folder."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


PHRASES = read_table("phrases.toml")
PATTERNS: dict[str, list[str]] = PHRASES["patterns"]
HABITS: dict[str, list[str]] = PHRASES["habits"]


class Fact(NamedTuple):
    """Patterns of a question, its answer, and its relative frequency."""

    patterns: list[str]
    answer: str
    weight: float = 1.0


class Corpus:
    """An endless stream of conversations drawn from `random`.

    A noisy corpus is for the second pass of training: questions have inserted and missing words, and there
    are more sums of two digits and more invented words to copy.
    """

    def __init__(self, random: Random, *, noisy: bool = False) -> None:
        self._random = random
        self._noisy = noisy
        facts = read_table("facts.toml")
        self._facts = list(about_fairlead(facts))
        self._facts_weights = list(accumulate(fact.weight for fact in self._facts))
        self._unknown: dict[str, Any] = facts["unknown"]
        self._exercises = list(EXERCISES)
        self._exercises_weights = list(accumulate(EXERCISES.values()))

    def conversation(self) -> list[Message]:
        """Return one conversation of one to twelve turns, sometimes after a system message."""
        random = self._random
        turns = 1 if random.random() < 0.55 else random.choice([2, 2, 2, 3, 3, 4, 6, 12])
        messages: list[Message] = []
        if random.random() < 0.25:
            messages.append({"role": "system", "content": random.choice(HABITS["system_prompts"])})
        name: str | None = None
        previous: Pair | None = None
        for _ in range(turns):
            question, answer = self._pair()
            draw = random.random()
            if draw < 0.03:
                name = random.choice(LISTS["names"])
                question, answer = self._introduction(name), f"Nice to meet you, {name}."
            elif draw < (0.09 if name else 0.01):
                question = random.choice(
                    ["What is my name?", "Who am I?", "Do you know my name?", "what's my name"]
                )
                answer = f"Your name is {name}." if name else "I do not know your name."
            elif previous and draw > 0.95:
                question, answer = self._back_reference(*previous)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            previous = question, answer
        return messages

    def document(self) -> str:
        """Return plain text, so that the model also learns completions without a chat."""
        sentences = [self._pair()[1] for _ in range(self._random.choice([1, 1, 2, 3, 5]))]
        return " ".join(sentences)

    def _pair(self) -> Pair:
        random = self._random
        if self._noisy:
            draw = random.random()
            if draw < 0.12:
                return sum_or_difference(random, largest=99)
            if draw < 0.22:
                return copy(random, invented_text(random))
        draw = random.random()
        if draw < 0.03:  # copies of any text, not only of lists of words
            return copy(random, self._rephrased(expand(random.choice(self._any_fact().patterns), random)))
        if draw < 0.44:
            (exercise,) = random.choices(self._exercises, cum_weights=self._exercises_weights)
            return exercise(random)
        if draw < 0.52:
            return self._rephrased(self._unknown_question()), str(self._unknown["answer"])
        fact = self._any_fact()
        return self._rephrased(expand(random.choice(fact.patterns), random)), fact.answer

    def _any_fact(self) -> Fact:
        (fact,) = self._random.choices(self._facts, cum_weights=self._facts_weights)
        return fact

    def _unknown_question(self) -> str:
        random = self._random
        question = expand(random.choice(self._unknown["ask"]), random)
        for kind in ("place", "person", "thing"):
            question = question.replace(f"@{kind}", random.choice(self._unknown[kind]))
        return question

    def _rephrased(self, question: str) -> str:
        """Return the question as people type it: politely, in lower case or with typing errors."""
        random = self._random
        if not question.isascii():
            return question + random.choice(["", "", "?"])
        is_question = question.split(maxsplit=1)[0] in HABITS["asking"]
        if self._noisy and random.random() < 0.5:
            question = add_noise(question, random)
        if random.random() < 0.12:
            prefix = random.choice(HABITS["politeness"])
            question = prefix + question[0].lower() + question[1:]
        if random.random() < 0.2:
            question = question.lower()
        if random.random() < 0.06 and len(question) > 12:
            question = mistype(question, random)
        ending = (
            random.choice(["?", "?", "?", "", "?", " ?"])
            if is_question
            else random.choice([".", "", "", "!"])
        )
        return question + ending

    def _introduction(self, name: str) -> str:
        form = self._random.choice(
            [
                "My name is {}.",
                "I am {}.",
                "Hello, I am {}.",
                "Hi, my name is {}",
                "Call me {}.",
                "my name is {}",
                "I'm {}.",
            ]
        )
        return form.format(name)

    def _back_reference(self, question: str, answer: str) -> Pair:
        if self._random.random() < 0.7:
            return self._random.choice(
                ["Say that again.", "Repeat that.", "Again, please.", "What did you say?", "Pardon?"]
            ), answer
        return self._random.choice(
            ["What did I ask?", "What did I just say?", "What was my question?"]
        ), f"You said: {question}"


def about_fairlead(facts: dict[str, Any]) -> Iterator[Fact]:
    """Yield every fact of facts.toml with its expanded patterns."""
    yield from (Fact(fact["ask"], fact["answer"], fact.get("weight", 1.0)) for fact in facts["fact"])
    for word in facts["word"]:
        name = word["name"]
        article = word.get("article", "An" if name[0] in "aeiou" else "A")
        subject = f"{article} {name}" if article else name.capitalize()
        names = one_of([name, *word.get("also", [])])
        yield Fact(
            [pattern.format(name=names) for pattern in PATTERNS["word"]],
            f"{subject} is {word['meaning']}.",
            weight=1.5,
        )
    for setting in facts["setting"]:
        key, names = setting["key"], one_of([setting["key"], *setting["also"]])
        yield Fact(
            [p.format(name=names) for p in PATTERNS["setting_value"]],
            f"The default of {key} is {setting['default']}.",
        )
        meaning = f"{key} says {setting['meaning']}."
        yield Fact([p.format(name=names) for p in PATTERNS["setting_meaning"]], meaning, 0.7)
    for error in facts["error"]:
        code, status = error["code"], error["status"]
        yield Fact(
            [p.format(code=code) for p in PATTERNS["status_of_code"]], f"{code} has status {status}.", 0.5
        )
        yield Fact(
            [p.format(code=code) for p in PATTERNS["meaning_of_code"]],
            f"{code} ({status}) means: {error['meaning']}.",
            0.6,
        )
        if not error.get("shared"):
            answer = f"{status} is {code}: {error['meaning']}."
            yield Fact([p.format(status=status) for p in PATTERNS["meaning_of_status"]], answer)
    for kind in ("command", "route"):
        for entry in facts[kind]:
            name = entry["name"]
            yield Fact(
                [p.format(name=name) for p in PATTERNS["meaning_of_command"]], f"{name} {entry['does']}.", 0.7
            )
            requests = [p.format(want=one_of(entry["want"])) for p in PATTERNS["want"]]
            yield Fact(requests, f"Use {name}: it {entry['does']}.")


def one_of(alternatives: list[str]) -> str:
    """Return a pattern of alternatives."""
    return f"({'|'.join(alternatives)})" if len(alternatives) > 1 else alternatives[0]


def expand(pattern: str, random: Random) -> str:
    """Choose one alternative of every (a|b) in the pattern, from the innermost outwards."""
    while group := re.search(r"\(([^()]*)\)", pattern):
        pattern = pattern[: group.start()] + random.choice(group[1].split("|")) + pattern[group.end() :]
    return pattern


def add_noise(question: str, random: Random) -> str:
    """Insert words and remove short ones, so that the model must find the relevant words."""
    words = [word for word in question.split(" ") if word not in HABITS["left_out"] or random.random() < 0.9]
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        words.insert(random.randint(1, max(1, len(words))), random.choice(HABITS["fillers"]))
    question = " ".join(words) or question
    if random.random() < 0.3:
        question = random.choice(HABITS["openings"]) + question[0].lower() + question[1:]
    if random.random() < 0.3:
        question += random.choice(HABITS["endings"])
    return question


def mistype(text: str, random: Random) -> str:
    """Remove, double or swap one letter."""
    position = random.randrange(1, len(text) - 2)
    a, b = text[position], text[position + 1]
    return text[:position] + random.choice(["", a + a, b + a, a + b]) + text[position + 2 :]
