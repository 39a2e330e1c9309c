"""The header of a GGUF file: its metadata, and where its tensors are.

Layout, all little-endian: "GGUF", version, number of tensors, number of keys; for each key its name, type and
value; for each tensor its name, sizes, type and offset; padding to the alignment; the tensors' bytes. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

A header is a stranger's: every count, length, offset and size is compared with a bound, and with what is left
of the file, before it is used. A fault is a `LoadFailed` with the file and the key or tensor. Nothing is
allocated that is larger than the file. The library `gguf` checks none of this, and takes seconds and hundreds
of megabytes for a vocabulary: tests use it as the oracle. Imports neither numpy nor torch.
"""

import math
import mmap
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fairlead.base.errors import LoadFailed

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 17
_MOST_NAME_BYTES = 1 << 16  # of a key: the format's own limit
_MOST_TENSOR_NAME_BYTES = 256
_MOST_TEXT_BYTES = 1 << 24  # of a string as a value, such as a chat template
_MOST_TOKEN_BYTES = 1 << 16  # of a string in an array
_MOST_ITEMS = 1 << 23  # of an array
_MOST_DIMENSIONS = 4
_MOST_HEADER_BYTES = 1 << 30
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_START = struct.Struct("<4sIQQ")
_TEXT, _LIST = 8, 9
# By type of a value: its format for `struct`. A boolean is a byte, 0 or 1.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOLEAN = 7


class BlockType(msgspec.Struct, frozen=True):
    """How a tensor's numbers are stored.

    name: ggml's.
    elements: the numbers of a block.
    nbytes: the bytes of a block.
    """

    name: str
    elements: int
    nbytes: int


# By ggml's number. Sizes are those of `GGML_QUANT_SIZES` of the library `gguf`.
TYPES = {
    number: BlockType(name, elements, nbytes)
    for number, name, elements, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (20, "IQ4_NL", 32, 18),
        (23, "IQ4_XS", 256, 136),
        (30, "BF16", 1, 2),
        (39, "MXFP4", 32, 17),
    )
}
# Types that exist, for the reason why a file is refused.
_UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as the header describes it.

    name: ggml's.
    shape: its sizes, the outermost first; the header has them the other way around.
    type: how its numbers are stored.
    begin: the offset of its first byte in the file.
    nbytes: the size of its content.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    begin: int
    nbytes: int


class Header(msgspec.Struct, frozen=True):
    """The header of one file, without a reference to the file.

    path: the file.
    metadata: by key: a number, a boolean, a string, or a `StoredArray`.
    tensors: in the order of the file.
    created: when the file was written, in Unix time.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    created: int


class StoredArray(msgspec.Struct, frozen=True):
    """An array of the metadata, which is decoded when it is asked for: a vocabulary has 10⁵ strings.

    content: its items as the file has them, checked for their bounds.
    kind: the type of its items.
    count: how many there are.
    """

    content: bytes
    kind: int
    count: int

    def values(self) -> list[Any]:
        """Return the items. `ValueError` if a string is not UTF-8."""
        if self.kind != _TEXT:
            numbers = list(struct.unpack(f"<{self.count}{_NUMBERS[self.kind]}", self.content))
            return [bool(number) for number in numbers] if self.kind == _BOOLEAN else numbers
        return [text.decode() for text in self._texts()]

    def _texts(self) -> Iterator[bytes]:
        at, content = 0, self.content
        for _ in range(self.count):
            end = at + 8 + _U64.unpack_from(content, at)[0]
            yield content[at + 8 : end]
            at = end


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory, to read. `LoadFailed` unless it is a file with content."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block forever
            raise LoadFailed(f"{path}: not a file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the path is malformed, or the file is empty
        raise LoadFailed(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def read_header(path: Path) -> Header:
    """Read the header of the file at `path`. `LoadFailed` if any of it is wrong or not known."""
    with map_file(path) as memory:
        return _Reader(path, memory).read()


class _Reader:
    """Walks through a header. `_at` is the offset that was reached."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._memory = memory
        self._size = len(memory)
        self._at = 0

    def read(self) -> Header:
        self._need(_START.size, "its beginning")
        magic, version, tensors, keys = _START.unpack_from(self._memory)
        self._at = _START.size
        if magic != MAGIC:
            raise self._fails("not a GGUF file")
        if version not in _VERSIONS:
            if version.to_bytes(4, "little") in {number.to_bytes(4, "big") for number in _VERSIONS}:
                raise self._fails("is for machines with the other order of bytes")
            raise self._fails(f"version {version} of GGUF is not supported ({_VERSIONS} are)")
        self._bounded("keys", keys, _MOST_KEYS, 13)
        self._bounded("tensors", tensors, _MOST_TENSORS, 32)
        metadata = dict(self._keys(keys))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._fails(
                f"general.alignment: must be a power of two from 8 to 65536, not {alignment!r:.50}"
            )
        entries = list(self._entries(tensors))
        begin = -(-self._at // alignment) * alignment
        placed = tuple(self._placed(entry, begin, alignment) for entry in entries)
        self._check_overlaps(placed)
        return Header(self._path, metadata, placed, int(self._path.stat().st_mtime))

    def _fails(self, reason: str) -> LoadFailed:
        return LoadFailed(f"{self._path}: {reason}")

    def _need(self, size: int, what: str) -> None:
        """Check that so many bytes are left of the file, and that the header does not become too long."""
        if size > self._size - self._at:
            raise self._fails(f"{what} reaches beyond the end of the file, which is truncated or wrong")
        if self._at + size > _MOST_HEADER_BYTES:
            raise self._fails(f"{what} makes the header longer than {_MOST_HEADER_BYTES} bytes")

    def _bounded(self, what: str, count: int, most: int, least_bytes: int) -> None:
        """Check a number of things that take at least so many bytes each."""
        if count > most:
            raise self._fails(f"has {count} {what}, more than {most}")
        self._need(count * least_bytes, f"the list of {count} {what}")

    def _number(self, kind: str, what: str) -> Any:
        size = struct.calcsize("<" + kind)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + kind, self._memory, self._at)
        self._at += size
        return value

    def _text(self, what: str, most: int) -> str:
        length = self._number("Q", what)
        if length > most:
            raise self._fails(f"{what} has {length} bytes, more than {most}")
        self._need(length, what)
        content = self._memory[self._at : self._at + length]
        self._at += length
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._fails(f"{what} is not UTF-8: {error}") from None

    def _keys(self, count: int) -> Iterator[tuple[str, Any]]:
        seen = set[str]()
        for index in range(count):
            name = self._text(f"the name of key {index}", _MOST_NAME_BYTES)
            if name in seen:
                raise self._fails(f"has the key {name!r:.100} twice")
            seen.add(name)
            yield name, self._value(f"key {name!r:.100}")

    def _value(self, what: str) -> Any:
        kind = self._number("I", what)
        if kind == _TEXT:
            return self._text(what, _MOST_TEXT_BYTES)
        if kind == _LIST:
            return self._array(what)
        if kind not in _NUMBERS:
            raise self._fails(f"{what} is of the type {kind}, which is not known")
        value = self._number(_NUMBERS[kind], what)
        return self._boolean(value, what) if kind == _BOOLEAN else value

    def _boolean(self, value: int, what: str) -> bool:
        if value > 1:
            raise self._fails(f"{what} is a boolean with the value {value}")
        return bool(value)

    def _array(self, what: str) -> StoredArray:
        """Return an array of numbers or of strings. Arrays of arrays exist on paper only."""
        kind, count = self._number("I", what), self._number("Q", what)
        if kind != _TEXT and kind not in _NUMBERS:
            raise self._fails(f"{what} is an array of the type {kind}, which is not supported")
        if count > _MOST_ITEMS:
            raise self._fails(f"{what} has {count} items, more than {_MOST_ITEMS}")
        begin = self._at
        if kind == _TEXT:
            self._need(8 * count, what)
            self._skip_texts(count, what)
        else:
            size = count * struct.calcsize("<" + _NUMBERS[kind])
            self._need(size, what)
            self._at += size
        content = self._memory[begin : self._at]
        if kind == _BOOLEAN and content.strip(b"\0\1"):
            raise self._fails(f"{what} has booleans that are neither 0 nor 1")
        return StoredArray(content, kind, count)

    def _skip_texts(self, count: int, what: str) -> None:
        at, memory, read = self._at, self._memory, _U64.unpack_from
        last = self._size - 8
        for index in range(count):
            length = read(memory, at)[0] if at <= last else self._size
            at += 8 + length
            if length > _MOST_TOKEN_BYTES or at > self._size:
                raise self._fails(f"{what}: item {index} is too long, or reaches beyond the end of the file")
        self._at = at

    def _entries(self, count: int) -> Iterator[tuple[str, tuple[int, ...], BlockType, int]]:
        """Yield name, shape, type and offset of each tensor."""
        seen = set[str]()
        for index in range(count):
            name = self._text(f"the name of tensor {index}", _MOST_TENSOR_NAME_BYTES)
            what = f"tensor {name!r:.100}"
            if name in seen:
                raise self._fails(f"has the {what} twice")
            seen.add(name)
            dimensions = self._number("I", what)
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._fails(f"{what} has {dimensions} dimensions")
            sizes = tuple(self._number("Q", what) for _ in range(dimensions))
            number, offset = self._number("I", what), self._number("Q", what)
            if number not in TYPES:
                known = ", ".join(kind.name for kind in TYPES.values())
                named = _UNREAD.get(number, f"the unknown type {number}")
                raise self._fails(f"{what} is of {named}, which is not supported ({known} are)")
            yield name, sizes[::-1], TYPES[number], offset

    def _placed(
        self, entry: tuple[str, tuple[int, ...], BlockType, int], begin: int, alignment: int
    ) -> TensorEntry:
        """Check the size and the place of a tensor; `begin`: where the first one is."""
        name, shape, kind, offset = entry
        what = f"tensor {name!r:.100} of {kind.name} {list(shape)}"
        count = math.prod(shape)  # of up to four 64-bit numbers: Python's integers do not overflow
        if not count or shape[-1] % kind.elements:
            raise self._fails(f"{what}: its rows are no whole blocks of {kind.elements}")
        nbytes = count // kind.elements * kind.nbytes
        if offset % alignment:
            raise self._fails(f"{what} is at the offset {offset}, which is not aligned to {alignment}")
        if begin + offset + nbytes > self._size:
            raise self._fails(f"{what} reaches beyond the end of the file, which is truncated or wrong")
        return TensorEntry(name, shape, kind, begin + offset, nbytes)

    def _check_overlaps(self, tensors: tuple[TensorEntry, ...]) -> None:
        """Check that no byte belongs to two tensors: a small file could say that it has large weights."""
        reached = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
            if tensor.begin < reached:
                raise self._fails(f"tensor {tensor.name!r:.100} overlaps another")
            reached = tensor.begin + tensor.nbytes
