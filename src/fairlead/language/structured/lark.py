"""Rules of a grammar in llguidance's dialect of Lark."""

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.pattern import Elements, SpecialTokens

BLANKS = "/[ \\n]{0,4}/"
TEXT = "/(.|\\n)*/"
# Between the tokens of JSON: one blank, or one line break with its indentation. Unlimited white space would
# let a model write it forever.
JSON_BLANKS = r"( |\n[ \t]{0,64})?"


class WorkLeft:
    """How long writing the rules of an answer may still take: `left`, in microseconds by estimate."""

    def __init__(self, left: int = 100_000) -> None:
        self.left = left


class Rules:
    """The rules of one grammar.

    `special`: the ids of special tokens.
    `lenient`: schemas may have keywords that llguidance does not support.
    `work`: what may be spent for them, which several grammars of one request can share.
    """

    def __init__(
        self, special: SpecialTokens, *, lenient: bool = False, work: WorkLeft | None = None
    ) -> None:
        self.special = special
        self.lenient = lenient
        self.work = work or WorkLeft()
        self._rules: dict[str, str] = {}
        self._reserved: set[str] = set()
        self._shared: dict[str, str] = {}  # names by definition

    def add(self, name: str, definition: str) -> str:
        """Add a rule and return its name. The same rule may be added again."""
        assert self._rules.get(name, definition) == definition, name
        self._rules[name] = definition
        return name

    def has(self, name: str) -> bool:
        """Return whether there is a rule of this name, or will be."""
        return name in self._rules or name in self._reserved

    def size(self, name: str) -> int:
        """Return the characters of a rule."""
        return len(self._rules[name])

    def reserve(self, name: str) -> None:
        """Announce a rule that refers to itself."""
        self._reserved.add(name)

    def state(self) -> tuple[int, int, frozenset[str]]:
        """Return what `undo` needs to remove the rules that are added from now on."""
        return len(self._rules), len(self._shared), frozenset(self._reserved)

    def undo(self, state: tuple[int, int, frozenset[str]]) -> None:
        """Remove the rules that were added after `state`."""
        rules, shared, reserved = state
        while len(self._rules) > rules:
            self._rules.popitem()
        while len(self._shared) > shared:
            self._shared.popitem()
        self._reserved = set(reserved)

    def shared(self, definition: str) -> str:
        """Add a rule, unless there is one of this definition, and return its name."""
        if definition not in self._shared:
            self._shared[definition] = self.add(f"shared_{len(self._shared)}", definition)
        return self._shared[definition]

    def terminal(self, *expressions: str, but: str | None = None) -> str:
        """Add a terminal of the texts that all regular expressions match, and return its name.

        `but`: a regular expression of texts that it does not match.
        """
        if but is not None:
            definition = f"{self.terminal(*expressions)} & ~{pattern.regex_literal(but)}"
        else:
            definition = " & ".join(map(pattern.regex_literal, expressions))
        if definition not in self._shared:
            self._shared[definition] = self.add(f"TERMINAL_{len(self._shared)}", definition)
        return self._shared[definition]

    def add_until(self, name: str, end: str, *bodies: str, between: str = "") -> str:
        """Add a rule of a text, up to and including the first occurrence of `end`, and return its name.

        If `end` is a token that ends the answer, nothing follows the text.

        `bodies`: regular expressions that the text before it must match; without them, it is any text.
        `between`: a regular expression of what is between that text and `end`.
        """
        mark = pattern.quoted(end, self.special)
        if mark and mark != pattern.plain(end) and not mark.startswith("<["):
            raise ValueError(f"{end} begins with text and has a special token, which no grammar finds")
        if not bodies:
            if not mark:
                return self.add(name, TEXT)
            if mark != pattern.plain(end):
                return self.add(name, f"{TEXT} {mark}")
            self._rules[f"{name}[suffix={mark}]"] = TEXT
            return name
        body = self.add(f"{name}_BODY".upper(), " & ".join(map(pattern.regex_literal, bodies)))
        if not mark:
            return self.add(name, body)
        if mark != pattern.plain(end):
            return self.add(name, f"{body} {mark}")
        closing = pattern.escaped(end)
        marked = self.add(f"{name}_MARKED".upper(), f"{body} {pattern.regex_literal(between + closing)}")
        later = pattern.regex_literal(rf"(.|\n)*{closing}(.|\n)+")
        return self.add(name, self.add(name.upper(), f"{marked} & ~{later}"))

    def of(self, elements: Elements, **captures: str) -> str:
        """Return what a rule needs to match a mark; `captures` has what stands for its named groups."""
        return pattern.to_lark(elements, self.special, captures)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {definition}" for name, definition in self._rules.items())
