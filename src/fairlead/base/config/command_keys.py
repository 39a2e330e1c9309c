"""The API keys that a command's server requires, as its command line and its environment give them. Pure.

llama-server, vLLM and SGLang have the option `--api-key`, and the first two variables of the environment.
llama-server takes several keys with commas between them, and a file with one on each line.
"""

import csv
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

VARIABLES = ("LLAMA_API_KEY", "VLLM_API_KEY")
_OPTION = "--api-key"
_FILE_OPTION = "--api-key-file"
# A word with one of these is for a shell, which puts another text in its place.
_OF_SHELLS = ("$", "`")


class CommandKeys(NamedTuple):
    """The keys that a server accepts, and the file that has others; None if it names none."""

    keys: tuple[str, ...]
    file: str | None = None


def keys_of(command: Sequence[str], environment: Mapping[str, str]) -> CommandKeys:
    """Return the keys of a command. Those of its line come before those of its environment."""
    words = list(_words(command))
    options = list(_options(words))
    lines = [value for name, value in options if name == _OPTION]
    assignments = [word.removeprefix("--env=").partition("=") for word in words]
    lines += [value for name, _, value in assignments if name in VARIABLES]
    lines += [environment[name] for name in VARIABLES if name in environment]
    file = next((value for name, value in options if name == _FILE_OPTION), None)
    return CommandKeys(tuple(dict.fromkeys(key for line in lines for key in _divided(line))), file)


def keys_in_file(content: bytes) -> tuple[str, ...]:
    """Return the keys of a file, one on each line."""
    lines = content.decode(errors="replace").splitlines()
    return tuple(line for line in lines if line)


def usable(keys: Iterable[str]) -> str | None:
    """Return the first key that a header may have; None if there is none."""
    return next((key for key in keys if key.isascii() and key.isprintable() and key == key.strip()), None)


def _words(command: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command, and those of a command line that one of them is for a shell."""
    for word in command:
        yield word
        if _OPTION in word and any(letter.isspace() for letter in word):
            with suppress(ValueError):
                yield from shlex.split(word)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, which is behind a `=` or the next word."""
    for index, word in enumerate(words):
        name, sign, value = word.partition("=")
        if not sign:
            value = words[index + 1] if index + 1 < len(words) else ""
        if value and not any(mark in value for mark in _OF_SHELLS):
            yield name.replace("_", "-"), value


def _divided(line: str) -> list[str]:
    """Return the keys of a list with commas, without empty ones."""
    try:
        return [key for key in next(csv.reader([line]), []) if key]
    except csv.Error:  # a line break
        return []
