"""Where a model's files are: in a directory of this machine, or on the Hugging Face hub, to be fetched.

Asked once, in the parent, before anything is read of the model. `huggingface_hub` does the
downloading and the caching, and obeys its own environment: HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE. Only weights in safetensors, JSON and the tokenizer's files are ever fetched.
"""

import fnmatch
import os
import re
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from fairlead.errors import LoadFailed

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*tokenizer*"]
# Other forms of the same weights: original layouts beside or below the ones that we read.
_UNWANTED = [
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
    """Return what to do about a model that is there as GGUF only."""
    return (
        f"{os.fspath(model)}: Fairlead reads safetensors, and this is GGUF. Use the same model in "
        "safetensors (organization/name of the hub), or have llama.cpp serve the file: in a "
        'configuration file, models: {NAME: {cmd: "llama-server --port ${PORT} -m FILE"}}'
    )


def is_gguf(model: str | os.PathLike[str]) -> bool:
    """Whether a name is of a GGUF file, or a directory has weights as GGUF only."""
    path = Path(model)
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix.lower() == ".gguf"


def find_model(model: str | os.PathLike[str], report: Report = lambda _: None) -> Path:
    """Return the directory of a model: a local one, or a hub id (`org/name`, `org/name@revision`) fetched.

    Blocks while it downloads; `report` hears from threads of its own which fraction is there. What exists
    here is never looked for on the hub. `LoadFailed` says what is missing: the directory, the
    repository, the permission or the network.
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


def is_hub_id(model: str) -> bool:
    """Whether a model could be on a hub under this name: `org/name`, `org/name@revision`."""
    return _ID.fullmatch(model) is not None


def _fetch(name: str, revision: str | None, report: Report) -> Path:
    import huggingface_hub  # slow to import, and needed for few models
    from huggingface_hub import errors

    try:
        total_bytes = _total_bytes(name, revision)
        directory = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
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
            f"{name}: no such directory, and no such model on the hub, or not for everybody (HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LoadFailed(f"{name}: the hub has no revision {revision!r} of it") from error
    except errors.LocalEntryNotFoundError as error:
        raise LoadFailed(
            f"{name}: not in the cache, and the hub cannot be reached: {_brief(error)}"
        ) from error
    except Exception as error:  # whatever a network, a disk and three libraries can raise
        raise LoadFailed(f"{name}: cannot be fetched from the hub: {_brief(error)}") from error
    report(1.0)
    return Path(directory)


def _total_bytes(name: str, revision: str | None) -> int | None:
    """How much there is to fetch, or None if the hub does not say; `LoadFailed` if there are no weights."""
    import huggingface_hub

    try:
        information = huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception:  # noqa: BLE001  the download meets it again, and may have all it needs in its cache
        return None
    sizes = {file.rfilename: file.size or 0 for file in information.siblings or ()}
    wanted = {file: size for file, size in sizes.items() if _matches(file, _WANTED)}
    wanted = {file: size for file, size in wanted.items() if not _matches(file, _UNWANTED)}
    if not any(file.endswith(".safetensors") for file in wanted):
        if any(file.lower().endswith(".gguf") for file in sizes):
            raise LoadFailed(gguf_advice(name))
        raise LoadFailed(f"{name}: it has no weights as safetensors, and pickled ones are never read")
    return sum(wanted.values())


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _bar(report: Report, total_bytes: int | None) -> type[Any]:
    """A progress bar's class that shows nothing and reports: the library has no other way to be asked."""
    tqdm: Any = import_module("tqdm.std").tqdm  # which comes with the library, and without types
    reached = 0.0
    one_at_a_time = threading.Lock()  # or what is reported would fall back now and then

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            options.pop("name", None)  # the library's own, which tqdm does not know
            super().__init__(*args, **{**options, "file": _NOWHERE, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal reached
            shown: bool | None = super().update(n)
            total = total_bytes or self.total
            if self._counts_bytes and total:
                # Retries count twice, and a library that counts sent and written bytes has two bars.
                with one_at_a_time:
                    reached = max(reached, min(1.0, self.n / total))
                    report(reached)
            return shown

    return Bar


class _Nowhere:
    """A file that takes everything."""

    def write(self, _text: str) -> None: ...

    def flush(self) -> None: ...


_NOWHERE = _Nowhere()


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
