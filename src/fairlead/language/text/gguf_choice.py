"""Which GGUF file is meant: by a path, by a folder with some, or by the name of a repository of a hub."""

import re
from collections.abc import Iterable
from pathlib import Path

from fairlead.base.errors import LoadFailed

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.ASCII | re.IGNORECASE)
_USUAL = "Q4_K_M"
# Files beside a model's that are no model: an image encoder, statistics for rounding.
_NO_MODEL = re.compile(r"(^|/)(mmproj|imatrix)|imatrix\.gguf$", re.IGNORECASE)
_MOST_NAMED = 20


def is_gguf(path: Path) -> bool:
    """Return whether a path has the ending of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def model_name(path: Path) -> str:
    """Return the name of the model at `path`: that of the folder or, without its ending, of the file."""
    return _PART.sub("", path.name)[: -len(".gguf")] if is_gguf(path) else path.name


def choose_files(names: Iterable[str], wanted: str | None, *, of: str) -> list[str]:
    """Return the file that is wanted, or all parts of it if it is split, the first one first.

    names: paths of files, of any kind.
    wanted: a file's name, or what stands before the ending, as Q4_K_M; None: that one, or the only model.
    of: what has these files, for errors.

    `LoadFailed`, which names some that there are, if none or several models are meant.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name):
            models.setdefault(_PART.sub("", name), []).append(name)
    tag = re.escape(wanted or _USUAL)
    ends = re.compile(rf"(^|[-._/]){tag}(\.gguf)?$", re.IGNORECASE)
    meant = [
        files
        for model, files in models.items()
        if model == wanted or ends.search(model.removesuffix(".gguf"))
    ]
    if wanted is None and len(models) == 1:
        meant = list(models.values())
    if len(meant) == 1:
        return meant[0]
    there = ", ".join(sorted(models)[:_MOST_NAMED]) or "none"
    how = f"named {wanted!r}" if wanted else f"without a name after a colon, and none or several are {_USUAL}"
    raise LoadFailed(f"{of}: {len(meant)} GGUF models are meant, {how}; there are: {there}")


def file_in(folder: Path) -> Path:
    """Return the model in a folder that has GGUF files and no safetensors."""
    names = [str(path.relative_to(folder)) for path in folder.glob("*.gguf")]
    return folder / choose_files(names, None, of=str(folder))[0]


def has_only_gguf(folder: Path) -> bool:
    """Return whether a folder has weights only as GGUF."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def absolute(path: Path) -> Path:
    """Return the path of a file without links in its folder; its own name stays, which may name parts."""
    return path.parent.resolve() / path.name
