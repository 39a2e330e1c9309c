"""Finds a model's files: in a directory of this machine, or on the Hugging Face hub, and downloads them.

Used once, in the parent process, before any file of the model is read. `huggingface_hub` downloads and
caches, with its own environment variables: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. Only weights in
safetensors, JSON and the tokenizer's files are downloaded.
"""

import fnmatch
import os
import re
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from fairlead.base.errors import LoadFailed

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
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
    "*.gguf",
    "*.onnx",
]

Report = Callable[[float], None]


def gguf_advice(model: str | os.PathLike[str]) -> str:
    """Return advice for a model that exists only as GGUF."""
    return (
        f"{os.fspath(model)}: Fairlead reads safetensors, and this is GGUF. Use the same model in "
        "safetensors (organization/name of the hub), or have llama.cpp serve the file: in a "
        'configuration file, models: {NAME: {cmd: "llama-server --port ${PORT} -m FILE"}}'
    )


def is_gguf(model: str | os.PathLike[str]) -> bool:
    """Return whether a name is a GGUF file's, or a directory has weights only as GGUF."""
    path = Path(model)
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix.lower() == ".gguf"


def find_model(model: str | os.PathLike[str], report: Report = lambda _: None) -> Path:
    """Return a model's directory: a local one, or the download of a hub id (`org/name`, `org/name@revision`).

    Blocks while it downloads; other threads call `report` with the fraction done. An existing path is never
    looked up on the hub. Raises `LoadFailed`, which names what is missing: the directory, the repository, the
    permission or the network.
    """
    path = Path(model)
    if is_gguf(model):
        raise LoadFailed(gguf_advice(model))
    if path.exists():
        return path.resolve()
    named = _ID.fullmatch(os.fspath(model))
    if named is None:
        raise LoadFailed(f"{model}: no such directory, and no model id of a hub (org/name)")
    return _fetch(named["name"], named["revision"], report)


def find_local(model: str | os.PathLike[str]) -> Path | None:
    """Return the directory that `find_model` would find without a network, or None."""
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    named = _ID.fullmatch(os.fspath(model))
    if path.exists() or named is None:
        return None
    import huggingface_hub  # slow to import
    from huggingface_hub import errors

    try:
        found = huggingface_hub.snapshot_download(
            named["name"],
            revision=named["revision"],
            allow_patterns=_ALLOW_PATTERNS,
            ignore_patterns=_IGNORE_PATTERNS,
            local_files_only=True,
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    return Path(found)


def is_hub_id(model: str) -> bool:
    """Return whether this may be the name of a model on a hub: `org/name`, `org/name@revision`."""
    return _ID.fullmatch(model) is not None


def _fetch(name: str, revision: str | None, report: Report) -> Path:
    import huggingface_hub  # slow to import, and needed for few models
    from huggingface_hub import errors

    try:
        total_bytes = _total_bytes(name, revision)
        directory = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=_ALLOW_PATTERNS,
            ignore_patterns=_IGNORE_PATTERNS,
            tqdm_class=_bar(report, total_bytes),
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
    return Path(directory)


def _total_bytes(name: str, revision: str | None) -> int | None:
    """Return the size of the download, None if it is unknown. Raises `LoadFailed` if there are no weights."""
    import huggingface_hub

    try:
        information = huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception:  # noqa: BLE001  the download raises it again, or only reads the cache
        return None
    sizes = {file.rfilename: file.size or 0 for file in information.siblings or ()}
    files = {file: size for file, size in sizes.items() if _matches(file, _ALLOW_PATTERNS)}
    files = {file: size for file, size in files.items() if not _matches(file, _IGNORE_PATTERNS)}
    if not any(file.endswith(".safetensors") for file in files):
        if any(file.lower().endswith(".gguf") for file in sizes):
            raise LoadFailed(gguf_advice(name))
        raise LoadFailed(f"{name}: it has no weights as safetensors, and pickled weights are never read")
    return sum(files.values())


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
