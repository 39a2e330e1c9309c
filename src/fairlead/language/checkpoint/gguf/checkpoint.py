"""A checkpoint that is a GGUF file, or the first of those that a model was split into.

Makes the documents of Hugging Face's layout of the metadata. What is not known is refused by name when the
header is read, before memory is taken. Files are read again only if they have changed.
"""

import fnmatch
import json
import re
import struct
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Self

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.gguf.families import NO_WEIGHTS, Family, Stored, place, read_family
from fairlead.language.checkpoint.gguf.header import MAGIC, Header, TensorEntry, read_header
from fairlead.language.checkpoint.gguf.metadata import Metadata
from fairlead.language.checkpoint.gguf.tensors import GgufTensor, MappedFile
from fairlead.language.checkpoint.gguf.vocabulary import Vocabulary
from fairlead.language.checkpoint.listing import TensorListing

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)
_MOST_FACTORS = 1024  # of a rotary embedding: pairs of channels
_TEMPLATE = "tokenizer.chat_template"
# Defaults of a request's parameters, by their names in `generation_config.json`.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_POOLINGS = {1: "mean", 3: "lasttoken"}


class MetadataDocument:
    """A document that is made of the metadata: `CheckpointDocument`. `write` is None if there is none."""

    def __init__(self, path: Path, name: str, write: Callable[[], bytes] | None) -> None:
        self._path, self._name, self._write = path, name, write

    @property
    def stem(self) -> str:
        return Path(self._name).stem

    def is_file(self) -> bool:
        return self._write is not None

    def read_bytes(self) -> bytes:
        if self._write is None:
            raise FileNotFoundError(2, "the metadata has nothing of it")
        return self._write()

    def __str__(self) -> str:
        return f"{self._path} ({self._name})"


class GgufCheckpoint:
    """`Checkpoint` of the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Return the checkpoint in a file; None if it is no GGUF."""
        try:
            if not path.is_file():
                return None
            with path.open("rb") as file:
                is_gguf = file.read(len(MAGIC)) == MAGIC
        except (OSError, ValueError):
            return None
        return cls(path) if is_gguf or path.suffix.lower() == ".gguf" else None

    @property
    def created(self) -> int:
        return self._headers[0].created

    def document(self, name: str) -> MetadataDocument:
        return MetadataDocument(self.path, name, self._documents.get(name))

    def documents(self, pattern: str) -> list[MetadataDocument]:
        return [self.document(name) for name in sorted(self._documents) if fnmatch.fnmatchcase(name, pattern)]

    def tensors(self) -> TensorListing:
        """Return the tensors by Hugging Face's names. `LoadFailed` for one that the family does not have."""
        found: dict[str, GgufTensor] = {}
        for header in self._headers:
            file = MappedFile(header.path)
            for entry in header.tensors:
                if entry.name not in NO_WEIGHTS:
                    self._add(found, file, entry)
        return TensorListing(self.path, found)

    def _add(self, found: dict[str, GgufTensor], file: MappedFile, entry: TensorEntry) -> None:
        """Add one tensor, or those of which it is a stack, to `found`."""
        pairs = 0
        if (at := place(self._family, entry.name)) is not None:
            pairs = self._family.rotated_pairs.get(at.part, 0)
        tensor = GgufTensor(
            file,
            entry.name,
            entry.shape,
            entry.type,
            entry.begin,
            pairs=pairs,
            size=entry.shape[0] if pairs else 0,
            offset=1.0 if self._family.offset_norms and entry.name.endswith("norm.weight") else 0.0,
        )
        if at is None:
            raise tensor.fails("is not one of this family's")
        if len(entry.shape) == 1 and entry.type.elements > 1:
            raise tensor.fails(f"is a vector of {entry.type.name}, which is not supported")
        if pairs and entry.shape[0] % (2 * pairs):
            raise tensor.fails(f"has {entry.shape[0]} rows for {pairs} heads")
        stack = "{}" in at.name
        if stack and len(entry.shape) != 3:
            raise tensor.fails(f"has shape {list(entry.shape)}, expected a matrix for each expert")
        for index, part in enumerate(tensor.parts() if stack else [tensor]):
            name = at.name.format(index) if stack else at.name
            if name in found:
                raise part.fails(f"is the same as {found[name].name!r}")
            found[name] = part

    @cached_property
    def _headers(self) -> tuple[Header, ...]:
        return _read_headers(self.path)

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(self.path, self._headers[0].metadata)

    @cached_property
    def _family(self) -> Family:
        entries = {entry.name: (header.path, entry) for header in self._headers for entry in header.tensors}
        embedding = entries.get("token_embd.weight")
        if embedding is None or len(embedding[1].shape) != 2:
            raise LoadFailed(f"{self.path}: tensor 'token_embd.weight' is missing, or no matrix")
        factors = {name: _read_factors(*entry) for name, entry in entries.items() if name in NO_WEIGHTS}
        kinds = {entry.type.name for _, entry in entries.values() if len(entry.shape) > 1}
        dtype = {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(
            frozenset(kinds), "bfloat16"
        )
        stored = Stored(
            names=frozenset(entries), vocab_size=embedding[1].shape[0], dtype=dtype, rope_factors=factors
        )
        return read_family(self._metadata, stored)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self._metadata)

    def _tokenizer_config(self) -> bytes:
        return json.dumps(self._vocabulary.special_tokens()).encode()

    def _template(self, key: str) -> bytes:
        return self._metadata.text(key).encode()

    def _tokenizer(self) -> bytes:
        return self._vocabulary.tokenizer()

    @cached_property
    def _documents(self) -> dict[str, Callable[[], bytes]]:
        """What writes each document that there is."""
        metadata = self._metadata
        documents: dict[str, Callable[[], bytes]] = {
            "config.json": lambda: json.dumps(self._family.config).encode(),
            "generation_config.json": lambda: json.dumps(self._generation()).encode(),
        }
        if "tokenizer.ggml.model" in metadata:
            documents["tokenizer.json"] = self._tokenizer
            documents["tokenizer_config.json"] = lambda: json.dumps(
                self._vocabulary.special_tokens()
            ).encode()
        if _TEMPLATE in metadata:
            documents["chat_template.jinja"] = partial(self._template, _TEMPLATE)
        for key in metadata.keys():  # noqa: SIM118  no dictionary
            name = key.removeprefix(f"{_TEMPLATE}.")
            if name != key and re.fullmatch(r"\w+", name):
                documents[f"additional_chat_templates/{name}.jinja"] = partial(self._template, key)
        documents |= self._pooling()
        return documents

    def _generation(self) -> dict[str, object]:
        found: dict[str, object] = {
            name: self._metadata.number(key) for name, key in _SAMPLING.items() if key in self._metadata
        }
        if "tokenizer.ggml.model" in self._metadata:
            found["eos_token_id"] = self._vocabulary.end_ids()
        return found

    def _pooling(self) -> dict[str, Callable[[], bytes]]:
        """Return the documents of a model that makes vectors, of length 1 as llama.cpp makes them."""
        key = f"{self._metadata.text('general.architecture')}.pooling_type"
        kind = self._metadata.integer(key, 0)
        if not kind:
            return {}
        if kind not in _POOLINGS:
            raise self._metadata.fails(key, f"{kind} is not supported ({_POOLINGS} are)")
        modules = [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
        ]
        return {
            "modules.json": lambda: json.dumps(modules).encode(),
            "1_Pooling/config.json": lambda: json.dumps({"pooling_mode": _POOLINGS[kind]}).encode(),
        }


def _read_factors(path: Path, entry: TensorEntry) -> tuple[float, ...]:
    """Return the numbers of a small tensor of factors, which must be float32."""
    count = entry.nbytes // 4
    if entry.type.name != "F32" or len(entry.shape) != 1 or count > _MOST_FACTORS:
        raise LoadFailed(
            f"{path}: tensor {entry.name!r} must have up to {_MOST_FACTORS} numbers of F32, not "
            f"{list(entry.shape)} of {entry.type.name}"
        )
    with path.open("rb") as file:
        file.seek(entry.begin)
        return struct.unpack(f"<{count}f", file.read(entry.nbytes))


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model at `path`: itself, or all that it was split into if it is the first.

    `LoadFailed` if it is another part than the first, or if one is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    if int(found["number"]) != 1:
        raise LoadFailed(
            f"{path}: is not the first part of its model, {found['stem']}-00001-of-{found['count']}.gguf"
        )
    count = int(found["count"])
    if not 1 <= count <= _MOST_PARTS:
        raise LoadFailed(f"{path}: {count} parts are not from 1 to {_MOST_PARTS}")
    paths = [
        path.with_name(f"{found['stem']}-{number:05}-of-{found['count']}.gguf")
        for number in range(1, count + 1)
    ]
    for part in paths:
        if not part.is_file():
            raise LoadFailed(f"{part}: is missing, of {count} parts")
    return paths


_MOST_PARTS = 1000


def _read_headers(path: Path) -> tuple[Header, ...]:
    """Return the headers of all files of a model, which must be parts of one."""
    paths = part_paths(path)
    headers = tuple(map(_read_unless_read, paths))
    names = dict[str, Path]()
    for number, header in enumerate(headers):
        said = (
            header.metadata.get("split.count", len(paths) if number else 1),
            header.metadata.get("split.no", number),
        )
        if said not in {(len(paths), number), (0, 0) if len(paths) == 1 else None}:
            raise LoadFailed(f"{header.path}: split.count, split.no: {said} in part {number} of {len(paths)}")
        for entry in header.tensors:
            if entry.name in names:
                raise LoadFailed(f"{header.path}: tensor {entry.name!r} is also in {names[entry.name].name}")
            names[entry.name] = header.path
    total = headers[0].metadata.get("split.tensors.count", len(names))
    if total != len(names):
        raise LoadFailed(f"{path}: split.tensors.count: {total}, but the files have {len(names)} tensors")
    return headers


def _read_unless_read(path: Path) -> Header:
    try:
        status = path.stat()
    except OSError as error:
        raise LoadFailed(f"{path}: {error.strerror or error}") from error
    return _read_version(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_version(path: Path, *_version: int) -> Header:
    """Read a file once in each version: text, settings and network are read one after another."""
    return read_header(path)
