"""Finds a model's files: in a directory of this machine, or on the Hugging Face hub, and downloads them.

Used once, in the parent process, before any file of the model is read. `huggingface_hub` downloads and
caches, with its own environment variables: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. Only weights in
safetensors, JSON and the tokenizer's files are downloaded, or the files of one GGUF.
"""

import fnmatch
import glob
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fairlead.base.errors import LoadFailed
from fairlead.language.text.gguf_choice import absolute, choose_files, file_in, has_only_gguf, is_gguf

_ID = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<file>[\w./-]+))?(@(?P<revision>[\w./-]+))?", re.ASCII
)
_ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*tokenizer*"]
# Other formats of the same weights, and the original layouts that some repositories also have.
_IGNORE_PATTERNS = [
    "*/*.safetensors",
    "consolidated*",
    "*.py",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.onnx",
]

Report = Callable[[float], None]


def find_model(model: str | os.PathLike[str], report: Report = lambda _: None) -> Path:
    """Return where a model is: a local directory or GGUF file, or the download of a hub id.

    A hub id is `org/name`, `org/name@revision`, or `org/name:Q4_K_M` for one of the GGUF files there. Blocks
    while it downloads; other threads call `report` with the fraction done. An existing path is never looked
    up on the hub. Raises `LoadFailed`, which names what is missing: the path, the repository, the permission
    or the network.
    """
    path = Path(model)
    if (local := _local(path)) is not None:
        return local
    if (named := _named(model)) is None:
        raise LoadFailed(f"{model}: no such directory or file, and no model id of a hub (org/name)")
    return _fetch(named["name"], named["file"], named["revision"], report)


def find_local(model: str | os.PathLike[str]) -> Path | None:
    """Return where `find_model` would find a model without a network, or None."""
    path = Path(model)
    try:
        if (local := _local(path)) is not None:
            return local
    except LoadFailed:
        return None
    if (named := _named(model)) is None:
        return None
    from huggingface_hub import errors  # slow to import

    name, file, revision = named["name"], named["file"], named["revision"]
    if file is None:
        try:
            return _downloaded(_cached(name, revision, _ALLOW_PATTERNS), None)
        except errors.LocalEntryNotFoundError:  # not there, or only some of it, as of a repository of GGUFs
            pass
        except (errors.HFValidationError, LoadFailed):
            return None
    try:
        folder = _cached(name, revision, [])
        return _downloaded(folder, file) if file is not None or has_only_gguf(folder) else None
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, LoadFailed):
        return None


def _cached(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the folder of a repository in the cache, which must have all files that match the patterns."""
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*patterns, "/"],  # no file has that name; without a pattern, all would match
            ignore_patterns=_IGNORE_PATTERNS,
            local_files_only=True,
        )
    )


def _local(path: Path) -> Path | None:
    """Return the model at a path, which may be a folder with a GGUF; None if there is nothing."""
    if path.is_dir():
        return absolute(file_in(path)) if has_only_gguf(path) else path.resolve()
    if is_gguf(path):
        return absolute(path) if path.exists() else None
    return path.resolve() if path.exists() else None


def _downloaded(folder: Path, file: str | None) -> Path:
    """Return the model in the folder of a download: the GGUF file that is meant, or the folder itself."""
    if file is None and not has_only_gguf(folder):
        return folder
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    return folder / choose_files(names, file, of=str(folder))[0]


def is_hub_id(model: str) -> bool:
    """Return whether this may be the name of a model on a hub: `org/name`, `org/name:file@revision`."""
    return _named(model) is not None


def _named(model: str | os.PathLike[str]) -> re.Match[str] | None:
    """Return the parts of a hub id; None if this is none, as a path of a GGUF file."""
    found = _ID.fullmatch(os.fspath(model))
    return None if found is None or (is_gguf(Path(model)) and not found["file"]) else found


def _fetch(name: str, file: str | None, revision: str | None, report: Report) -> Path:
    import huggingface_hub  # slow to import, and needed for few models
    from huggingface_hub import errors

    try:
        wanted = _wanted(name, file, revision)
        directory = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=wanted.allow,
            ignore_patterns=wanted.ignore,
            tqdm_class=_bar(report, wanted.total_bytes),
        )
    except LoadFailed:
        raise
    except errors.GatedRepoError as error:
        raise LoadFailed(
            f"{name}: its authors must grant access first; then set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadFailed(
            f"{name}: no such directory, and no such model on the hub, or only with a token (HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LoadFailed(f"{name}: the hub has no revision {revision!r} of it") from error
    except errors.LocalEntryNotFoundError as error:
        raise LoadFailed(
            f"{name}: not in the cache, and the hub cannot be reached: {_brief(error)}"
        ) from error
    except Exception as error:  # a network, a disk and three libraries can raise anything
        raise LoadFailed(f"{name}: cannot be downloaded from the hub: {_brief(error)}") from error
    report(1.0)
    return _downloaded(Path(directory), file)


class _Wanted(NamedTuple):
    """The files to download: patterns of their names, and their size in bytes, None if it is unknown."""

    allow: list[str]
    ignore: list[str]
    total_bytes: int | None


def _wanted(name: str, file: str | None, revision: str | None) -> _Wanted:
    """Return which files of a repository to download. Raises `LoadFailed` if there are no weights.

    Without the hub, these are the files that are there already.
    """
    import huggingface_hub

    try:
        information = huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception:  # noqa: BLE001  the download raises it again, or only reads the cache
        id_ = f"{name}{f':{file}' if file else ''}{f'@{revision}' if revision else ''}"
        found = find_local(id_)
        return _Wanted(["/"] if found is not None else _ALLOW_PATTERNS, _IGNORE_PATTERNS, None)
    sizes = {each.rfilename: each.size or 0 for each in information.siblings or ()}
    files = {each: size for each, size in sizes.items() if _matches(each, _ALLOW_PATTERNS)}
    files = {each: size for each, size in files.items() if not _matches(each, _IGNORE_PATTERNS)}
    has_safetensors = any(each.endswith(".safetensors") for each in files)
    if file is not None or (not has_safetensors and any(map(is_gguf, map(Path, sizes)))):
        chosen = choose_files(sizes, file, of=name)
        return _Wanted([glob.escape(each) for each in chosen], [], sum(sizes[each] for each in chosen))
    if not has_safetensors:
        raise LoadFailed(
            f"{name}: it has no weights as safetensors or GGUF, and pickled weights are never read"
        )
    return _Wanted(_ALLOW_PATTERNS, _IGNORE_PATTERNS, sum(files.values()))


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _bar(report: Report, total_bytes: int | None) -> type[Any]:
    """Return a `tqdm` class that only calls `report`: the library has no other way to get the progress."""
    tqdm: Any = import_module("tqdm.std").tqdm  # a dependency of the library, without type hints
    reached = 0.0
    lock = threading.Lock()  # else the reported fraction could decrease

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            options.pop("name", None)  # an option of the library, not of tqdm
            super().__init__(*args, **{**options, "file": _NULL_FILE, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal reached
            shown: bool | None = super().update(n)
            total = total_bytes or self.total
            if self._counts_bytes and total:
                # Retries count twice, and a library that counts received and written bytes has two bars.
                with lock:
                    reached = max(reached, min(1.0, self.n / total))
                    report(reached)
            return shown

    return Bar


class _NullFile:
    """A file that discards everything."""

    def write(self, _text: str) -> None: ...

    def flush(self) -> None: ...


_NULL_FILE = _NullFile()


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
