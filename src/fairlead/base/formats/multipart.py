"""Forms, `multipart/form-data` (RFC 7578): read piece by piece, and the heads of parts written. Pure.

`FormParser` separates the contents of the parts from what is between them. Servers differ in how they read
unusual heads. So a form is never passed on as it came, but written anew, with a boundary of our own: what is
read here is what the next server reads.

    --b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n   → "model", 7 bytes
"""

import re
from collections.abc import Collection
from typing import Literal
from urllib.parse import unquote

FORM = "multipart/form-data"
MOST_PARTS = 128
# Of all parts together. Contents are not bounded here.
HEADS_BYTES = 64 * 1024
PREAMBLE_BYTES = 1024
# The longest value that is kept.
VALUE_BYTES = 4096

_PADDING_BYTES = 256
_BOUNDARY = re.compile(r";\s*boundary\s*=\s*(?:\"([^\"\\]*)\"|([^\s;\"]+))(?=\s*(?:;|$))", re.IGNORECASE)
_BOUNDARY_CHARS = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)")
_PARAMETER = re.compile(r"[ \t]*;[ \t]*([A-Za-z*]+)[ \t]*=[ \t]*(\"(?:[^\"\\]|\\.)*\"|[^;\"\s]*)")
_ESCAPED = re.compile(r"\\([\"\\])")
# What a value of a header must not contain, as in HTML's own form of these names.
_ENCODED = {'"': "%22", "\r": "%0D", "\n": "%0A"}
_AS_THEY_ARE = frozenset({"", "7bit", "8bit", "binary"})


class InvalidForm(Exception):
    """The form cannot be read. `field`: the name of the part at fault, if one is."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ReadPart:
    """A part of a form. `start` and `size`: where its content is among those of all parts, joined.

    `filename` None: it is a field, not a file. `content_type`: as it was sent; empty: it has none.
    """

    __slots__ = ("content_type", "filename", "name", "size", "start")

    def __init__(self, name: str, filename: str | None, content_type: str, start: int) -> None:
        self.name = name
        self.filename = filename
        self.content_type = content_type
        self.start = start
        self.size = 0


def is_form(content_type: str) -> bool:
    """Return whether a body of this type is a form."""
    return content_type.partition(";")[0].strip().lower() == FORM


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a form, as its `Content-Type` names it. Raises `InvalidForm`."""
    found = _BOUNDARY.findall(content_type)
    if len(found) != 1:
        raise InvalidForm("a form needs one boundary", "Content-Type")
    boundary: str = found[0][0] or found[0][1]
    if _BOUNDARY_CHARS.fullmatch(boundary) is None:
        raise InvalidForm(
            "the boundary must be 1 to 70 of the characters that RFC 2046 allows", "Content-Type"
        )
    return boundary.encode("ascii")


class FormParser:
    """Reads one form. Takes little memory, whatever comes: it buffers heads, and kept values.

    boundary: that of the form.
    kept: names of fields. `values` gets their values. Each may be given once, and not as a file.
    """

    def __init__(self, boundary: bytes, kept: Collection[str] = ()) -> None:
        self.parts: list[ReadPart] = []
        self.values: dict[str, str] = {}
        self._kept = kept
        self._value: bytearray | None = None  # of the current part, if it is kept
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that the first delimiter is as all others
        self._state: Literal["preamble", "delimiter", "head", "content", "end"] = "preamble"
        self._preamble = self._heads = self._contents = 0

    def feed(self, data: bytes) -> bytes:
        """Return what the data contain of the parts' contents, joined. Raises `InvalidForm`."""
        if self._state == "end":
            return b""  # nothing is read of what follows the last boundary
        self._buffer += data
        contents = bytearray()
        while self._step(contents):
            pass
        return bytes(contents)

    def end(self) -> None:
        """Check that the form is complete, when its body is. Raises `InvalidForm`."""
        if self._state != "end":
            raise InvalidForm("the form ends before its last boundary")

    def _step(self, contents: bytearray) -> bool:
        """Read up to the next change of state; return whether there was one."""
        match self._state:
            case "preamble" | "content":
                return self._read_content(contents)
            case "delimiter":
                return self._read_delimiter()
            case "head":
                return self._read_head()
        self._buffer.clear()
        return False

    def _read_content(self, contents: bytearray) -> bool:
        at = self._buffer.find(self._delimiter)
        is_whole = at >= 0
        # The end of the buffer may be the beginning of a delimiter.
        size = at if is_whole else max(0, len(self._buffer) - len(self._delimiter) + 1)
        with memoryview(self._buffer) as view:
            self._take(view[:size], contents)
        del self._buffer[: size + len(self._delimiter) if is_whole else size]
        if is_whole:
            self._end_part()
            self._state = "delimiter"
        return is_whole

    def _take(self, piece: memoryview, contents: bytearray) -> None:
        if self._state == "preamble":
            self._preamble += len(piece)
            if self._preamble > PREAMBLE_BYTES:
                raise InvalidForm("the body does not begin with the boundary that Content-Type names")
            return
        part = self.parts[-1]
        if self._value is not None:
            self._value += piece[: VALUE_BYTES + 1]
            if len(self._value) > VALUE_BYTES:
                raise InvalidForm(f"must have at most {VALUE_BYTES} bytes", part.name)
        contents += piece
        part.size += len(piece)
        self._contents += len(piece)

    def _end_part(self) -> None:
        if self._value is not None:
            name = self.parts[-1].name
            try:
                self.values[name] = self._value.decode()
            except UnicodeDecodeError:
                raise InvalidForm("is not valid UTF-8", name) from None
            self._value = None

    def _read_delimiter(self) -> bool:
        """Read what follows a boundary: two hyphens at the end of the form, else the end of the line."""
        rest = self._buffer.lstrip(b" \t")
        padding = len(self._buffer) - len(rest)
        if padding > _PADDING_BYTES:
            raise InvalidForm("a boundary is followed by too many spaces")
        if len(rest) < 2:
            return False
        if not padding and rest.startswith(b"--"):
            self._state = "end"
        elif rest.startswith(b"\r\n"):
            self._state = "head"
            del self._buffer[:padding]
        else:
            raise InvalidForm("a boundary is not followed by the end of its line")
        return True

    def _read_head(self) -> bool:
        # The buffer begins with the end of the boundary's line, so that a head without lines is found, too.
        at = self._buffer.find(b"\r\n\r\n")
        if self._heads + (len(self._buffer) if at < 0 else at) > HEADS_BYTES:
            raise InvalidForm(f"the heads of the parts have more than {HEADS_BYTES} bytes")
        if at < 0:
            return False
        if len(self.parts) == MOST_PARTS:
            raise InvalidForm(f"a form may have {MOST_PARTS} parts")
        part = _part_of(self._buffer[2:at].decode(errors="replace"), self._contents)
        self._heads += at
        del self._buffer[: at + 4]
        self._begin_part(part)
        self._state = "content"
        return True

    def _begin_part(self, part: ReadPart) -> None:
        if part.name in self._kept:
            if any(part.name == earlier.name for earlier in self.parts):
                raise InvalidForm("is given twice", part.name)
            if part.filename is not None:
                raise InvalidForm("must be a text, not a file", part.name)
            self._value = bytearray()
        self.parts.append(part)


def part_head(boundary: bytes, name: str, filename: str | None = None, content_type: str = "") -> bytes:
    """Return what stands before the content of a part, except for the line end that precedes its boundary."""
    head = f'Content-Disposition: form-data; name="{_encoded(name)}"'
    if filename is not None:
        head += f'; filename="{_encoded(filename)}"'
    if content_type:
        head += f"\r\nContent-Type: {content_type}"
    return b"--%s\r\n%s\r\n\r\n" % (boundary, head.encode(errors="replace"))


def _encoded(text: str) -> str:
    return "".join(_ENCODED.get(letter, letter) for letter in text)


def _part_of(head: str, start: int) -> ReadPart:
    """Return the part with this head."""
    headers: dict[str, str] = {}
    for line in head.split("\r\n"):
        found = _HEADER.fullmatch(line)
        if found is None or any(ord(letter) < 0x20 and letter != "\t" for letter in line):
            raise InvalidForm("a part has a line that is no header")
        name = found[1].lower()
        if name in headers:
            raise InvalidForm(f"a part has the header {found[1][:100]} twice")
        headers[name] = found[2].strip(" \t")
    parameters = _disposition(headers.get("content-disposition", ""))
    name = parameters.get("name", "")
    if not name:
        raise InvalidForm("a part has no name")
    if headers.get("content-transfer-encoding", "").lower() not in _AS_THEY_ARE:
        raise InvalidForm("must not have a Content-Transfer-Encoding", name)
    content_type = headers.get("content-type", "")
    if not content_type.isascii():
        raise InvalidForm("has a Content-Type that is not ASCII", name)
    filename = parameters.get("filename")
    if (extended := parameters.get("filename*")) is not None:
        encoding, _, text = extended.partition("'")
        charset = "latin-1" if encoding.lower() == "iso-8859-1" else "utf-8"
        filename = unquote(text.partition("'")[2], charset, "replace")
    return ReadPart(name, filename, content_type, start)


def _disposition(value: str) -> dict[str, str]:
    """Return the parameters of a `Content-Disposition`."""
    kind, semicolon, rest = value.partition(";")
    if kind.strip().lower() != "form-data":
        raise InvalidForm("a part has no Content-Disposition: form-data")
    parameters: dict[str, str] = {}
    rest, at = semicolon + rest, 0
    while at < len(rest.rstrip("; \t")):
        found = _PARAMETER.match(rest, at)
        if found is None or found[1].lower() in parameters:
            raise InvalidForm("a part has a Content-Disposition that cannot be read")
        given = found[2]
        parameters[found[1].lower()] = _ESCAPED.sub(r"\1", given[1:-1]) if given.startswith('"') else given
        at = found.end()
    return parameters
