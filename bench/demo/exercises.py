"""Random exercises for the demonstration model: small sums, copying, counting and lists.

An exercise is a function of a random generator that returns one (question, answer) pair.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Pair = tuple[str, str]

TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "exercises.toml").read_text(encoding="utf-8")
)
FORMS: dict[str, list[str]] = TABLES["forms"]
LISTS: dict[str, list[str]] = {name: text.split() for name, text in TABLES["lists"].items()}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WORDS, SMALL_WORDS, NAMES, OPPOSITES = (LISTS[k] for k in ("words", "small_words", "names", "opposites"))
NUMERALS, ORDINALS, DAYS, MONTHS = (LISTS[k] for k in ("numerals", "ordinals", "days", "months"))


def sum_or_difference(random: Random, largest: int | None = None) -> Pair:
    if largest is None:
        largest = random.choice([9, 9, 20, 99])
    a, b = random.randint(0, largest), random.randint(0, largest)
    if random.random() < 0.6:
        expression = random.choice(
            [f"{a} + {b}", f"{a}+{b}", f"{a} plus {b}", f"the sum of {a} and {b}", f"{a} and {b} together"]
        )
        order = f"Add {a} and {b}" if random.random() < 0.5 else f"Add {b} to {a}"
        return random.choice([question_about(random, expression)] * 5 + [order]), f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    expression = random.choice([f"{a} - {b}", f"{a}-{b}", f"{a} minus {b}", f"{a} less {b}"])
    order = f"Subtract {b} from {a}" if random.random() < 0.5 else f"Take {b} away from {a}"
    return random.choice([question_about(random, expression)] * 5 + [order]), f"{a} - {b} = {a - b}."


def product(random: Random) -> Pair:
    a, b = random.randint(0, 10), random.randint(0, 10)
    if random.random() < 0.2 and b:
        expression = random.choice([f"{a * b} / {b}", f"{a * b} divided by {b}", f"{a * b}/{b}"])
        return question_about(random, expression), f"{a * b} / {b} = {a}."
    expression = random.choice(
        [f"{a} * {b}", f"{a}*{b}", f"{a} times {b}", f"{a} x {b}", f"the product of {a} and {b}"]
    )
    return question_about(random, expression), f"{a} * {b} = {a * b}."


def sum_in_words(random: Random) -> Pair:
    a, b = random.randint(0, 10), random.randint(0, 10)
    if random.random() < 0.6:
        return question_about(random, f"{NUMERALS[a]} plus {NUMERALS[b]}"), f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    return question_about(random, f"{NUMERALS[a]} minus {NUMERALS[b]}"), f"{a} - {b} = {a - b}."


def sum_too_large(random: Random) -> Pair:
    a, b = random.randint(101, 99999), random.randint(101, 99999)
    return question_about(
        random, f"{a} {random.choice('+-*/')} {b}"
    ), "That is too large for me; I only do small sums."


def question_about(random: Random, expression: str) -> str:
    """Return a question about the value of an expression."""
    form = random.choice(FORMS["question_about"])
    return form.format(expression)


def comparison(random: Random) -> Pair:
    a, b = random.sample(range(100), 2)
    if random.random() < 0.5:
        form = random.choice(FORMS["larger"])
        return form.format(a, b), f"{max(a, b)} is larger."
    form = random.choice(FORMS["smaller"])
    return form.format(a, b), f"{min(a, b)} is smaller."


def parity(random: Random) -> Pair:
    number = random.randint(0, 99)
    claimed, kind = random.choice(["even", "odd"]), "odd" if number % 2 else "even"
    question = random.choice(
        [
            f"Is {number} {claimed}?",
            f"Is {number} an {claimed} number?",
            f"Is the number {number} {claimed}?",
        ]
    )
    return question, f"{'Yes' if claimed == kind else 'No'}, {number} is {kind}."


def copy(random: Random, text: str | None = None) -> Pair:
    if text is None:
        text = something_to_copy(random)
    form = random.choice(FORMS["copy"])
    return form.format(text), text


def something_to_copy(random: Random) -> str:
    kind = random.random()
    if kind < 0.1:
        return " ".join(str(random.randint(0, 99)) for _ in range(random.randint(1, 6)))
    if kind < 0.2:
        return "".join(random.choices(ALPHABET, k=random.randint(2, 7)))
    pool = WORDS + NAMES if kind < 0.4 else WORDS
    if random.random() < 0.3:
        pool = pool + SMALL_WORDS * 6
    words = random.choices(pool, k=random.randint(1, 8))
    if random.random() < 0.1:
        words.insert(random.randint(0, len(words)), "".join(random.choices(ALPHABET, k=random.randint(2, 6))))
    text = random.choice([" ", " ", " ", ", "]).join(words)
    if random.random() < 0.2:
        text = text[0].upper() + text[1:] + random.choice(["", ".", "!"])
    return text


def invented_text(random: Random) -> str:
    """Return invented words mixed with known ones, so that the model learns to copy."""
    words = []
    for _ in range(random.randint(1, 6)):
        syllables = [
            random.choice(LISTS["consonants"]) + random.choice("aeiou") for _ in range(random.randint(1, 4))
        ]
        invented = "".join(syllables) + random.choice(["", "n", "r", "s", "t", "ng"])
        words.append(random.choice([invented, invented, random.choice(WORDS), random.choice(SMALL_WORDS)]))
    if random.random() < 0.4:
        words[0] = words[0].capitalize()
    return " ".join(words) + random.choice(["", "", ".", "!", "?"])


def count(random: Random) -> Pair:
    start = 1 if random.random() < 0.35 else random.randint(0, 40)
    end = start + random.randint(1, 14)
    upwards = ", ".join(map(str, range(start, end + 1)))
    downwards = ", ".join(map(str, range(end, start - 1, -1)))
    if random.random() < 0.25:
        form = random.choice(FORMS["count_down"])
        return form.format(start=start, end=end) + random.choice(["", ".", "!"]), downwards
    if start == 1 and random.random() < 0.6:
        form = random.choice(FORMS["count_to"])
    else:
        form = random.choice(FORMS["count_from"])
    return form.format(start=start, end=end) + random.choice(["", "", ".", "?"]), upwards


def next_or_previous(random: Random) -> Pair:
    """Return a question about the number, day, month or letter after or before another."""
    kind = random.choice(["number", "day", "day", "month", "month", "letter"])
    names = {
        "number": list(map(str, range(101))),
        "day": DAYS,
        "month": MONTHS,
        "letter": list(ALPHABET.upper()),
    }[kind]
    cyclic = kind in ("day", "month")
    position = random.randrange(len(names)) if cyclic else random.randrange(1, len(names) - 1)
    step, word = random.choice([(1, "after"), (1, "after"), (-1, "before")])
    answer = f"{names[(position + step) % len(names)]} comes {word} {names[position]}."
    form = random.choice(FORMS["next_or_previous"])
    return form.format(word, names[position], kind=kind), answer


def recite(random: Random) -> Pair:
    """Return a question about a well-known list, its length, or one of its items by number."""
    position = random.randrange(12)
    month, day = f"the {ORDINALS[position]} month", f"the {ORDINALS[position % 7]} day"
    questions: dict[str, list[str]] = {
        ", ".join(DAYS) + ".": FORMS["days"],
        ", ".join(MONTHS) + ".": FORMS["months"],
        " ".join(ALPHABET): FORMS["alphabet"],
        "A week has 7 days.": FORMS["week"],
        "A year has 12 months.": FORMS["year"],
        f"{MONTHS[position]} is {month}.": [f"What is {month} of the year?"],
        f"{DAYS[position % 7]} is {day}.": [f"What is {day} of the week?"],
    }
    pairs = [
        (random.choice(forms) if len(forms) > 1 else forms[0], answer) for answer, forms in questions.items()
    ]
    return random.choice(pairs)


def spell(random: Random) -> Pair:
    word = random.choice(WORDS)
    kind = random.random()
    if kind < 0.7:
        form = random.choice(FORMS["spell"])
        return form.format(word), "-".join(word)
    if kind < 0.85:
        form = random.choice(["What is the first letter of {}?", "Which letter does {} begin with?"])
        return form.format(word), f"The first letter of {word} is {word[0]}."
    return f"How many letters are in {word}?", f"{'-'.join(word)}: {len(word)} letters."


def opposite(random: Random) -> Pair:
    position = random.randrange(len(OPPOSITES))
    word, other = OPPOSITES[position], OPPOSITES[position ^ 1]
    form = random.choice(FORMS["opposite"])
    return form.format(word), f"The opposite of {word} is {other}."


# Relative frequency of each exercise.
EXERCISES: dict[Callable[[Random], Pair], float] = {
    sum_or_difference: 18,
    product: 5,
    sum_in_words: 3,
    sum_too_large: 1,
    comparison: 2,
    parity: 1,
    copy: 14,
    count: 9,
    next_or_previous: 4,
    recite: 2,
    spell: 3,
    opposite: 1,
}
