"""`fairlead models`, `pull`, `show` and `rm`: the models on this machine, in the cache of the hub's library.

Nothing here needs a server. A model of a configuration is named by its folder, or by its name on the hub.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fairlead.base.config import ConfigError, demonstration_model
from fairlead.base.errors import LoadFailed, printable
from fairlead.language.text.hub import Report, find_local, find_model, is_hub_id
from fairlead.server.console.announcer import report_error

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

MB = 1000**2
WEIGHTS = (".safetensors", ".gguf")


class LocalModel(msgspec.Struct, frozen=True):
    """A model on this machine.

    name: what `serve` and the other commands call it.
    bytes: what its files take on the disk.
    used_at: when a file was last read or written, in ISO 8601; None: not known.
    """

    name: str
    bytes: int
    used_at: str | None


class Description(msgspec.Struct, frozen=True):
    """What a model's files say of it.

    name: as it was given.
    path: its folder.
    architecture: the class of its network.
    network: what computes it here.
    parameters: the number of its weights.
    dtype: what they are stored as, with the number of tensors of each.
    bytes: what they take.
    context: the most tokens of a prompt and its answer.
    makes: `text`, `vectors` or `scores`.
    sampling: the defaults of its authors.
    """

    name: str
    path: str
    architecture: str
    network: str
    parameters: int
    dtype: str
    bytes: int
    context: int
    makes: str
    sampling: dict[str, float]


def models(*, as_json: bool) -> int:
    """Print the models on this machine, the last used one first. Return the exit code."""
    found = sorted(_cached(), key=lambda model: model.used_at or "", reverse=True)
    demonstration = demonstration_model()
    size = sum(file.stat().st_size for file in demonstration.iterdir() if file.is_file())
    found.append(LocalModel(demonstration.name, size, None))
    if as_json:
        print(json.dumps([msgspec.to_builtins(model) for model in found], indent=2))
        return 0
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("MODEL", overflow="fold")
    table.add_column("SIZE", justify="right")
    table.add_column("LAST USED")
    for model in found:
        used = "comes with Fairlead" if model.used_at is None else model.used_at[:16].replace("T", " ")
        table.add_row(model.name, f"{model.bytes / MB:,.0f} MB", used)
    Console(highlight=False).print(table)
    return 0


def pull(name: str) -> int:
    """Fetch a model of the hub, or what is new of it. Return the exit code."""
    _check_hub_id(name)
    try:
        with _bar(name) as report:
            folder = find_model(name, report)
    except LoadFailed as error:
        report_error(str(error))
        return 1
    print(f"{name} is in {folder}")
    return 0


def show(name: str, *, as_json: bool) -> int:
    """Print what a model's files say of it. Return the exit code."""
    try:
        description = _describe(name)
    except (LoadFailed, ConfigError) as error:
        report_error(str(error))
        return 1
    if as_json:
        print(json.dumps(msgspec.to_builtins(description), indent=2))
        return 0
    sampling = ", ".join(f"{key} {value:g}" for key, value in description.sampling.items())
    rows = {
        "model": description.name,
        "folder": description.path,
        "architecture": description.architecture,
        "runs on": description.network,
        "parameters": f"{description.parameters:,}",
        "stored as": description.dtype,
        "size": f"{description.bytes / MB:,.0f} MB",
        "context": f"{description.context:,} tokens",
        "makes": description.makes,
        "sampling": sampling or "no defaults",
    }
    width = max(map(len, rows))
    for title, value in rows.items():
        print(f"{title:<{width}}  {printable(value)}")
    return 0


def rm(name: str) -> int:
    """Remove a model of the hub from this machine. Return the exit code."""
    _check_hub_id(name)
    repository = name.partition("@")[0]
    cache = _repositories().get(repository)
    if cache is None:
        report_error(f"{repository}: is not on this machine; `fairlead models` lists the models that are")
        return 1
    # The library frees revisions, whose files are links. Its cache of a repository is all of them.
    shutil.rmtree(cache.repo_path)
    print(f"{repository} is removed: {cache.size_on_disk / MB:,.0f} MB are free.")
    return 0


def _check_hub_id(name: str) -> None:
    """Raise `ConfigError` unless this can be the name of a model on the hub."""
    if not is_hub_id(name):
        raise ConfigError(f"MODEL: a model of the hub is written organization/name, not {name!r}")


def _cached() -> Iterator[LocalModel]:
    for name, cache in _repositories().items():
        if any(file.file_name.endswith(WEIGHTS) for each in cache.revisions for file in each.files):
            used = max(cache.last_accessed, cache.last_modified)
            yield LocalModel(name, cache.size_on_disk, datetime.fromtimestamp(used, UTC).isoformat())


def _repositories() -> "dict[str, CachedRepoInfo]":
    """Return the models in the cache of the hub's library, by name."""
    import huggingface_hub  # slow to import
    from huggingface_hub.errors import CacheNotFound

    try:
        found = huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return {}
    return {cache.repo_id: cache for cache in found.repos if cache.repo_type == "model"}


def _describe(name: str) -> Description:
    """Read a model's files. Raises `LoadFailed` or `ConfigError`."""
    from collections import Counter
    from math import prod

    from fairlead.language.checkpoint.folder import read_folder

    path = find_local(demonstration_model() if name == demonstration_model().name else Path(name))
    if path is None:
        advice = f"; `fairlead pull {name}` fetches it" if is_hub_id(name) else ""
        raise LoadFailed(f"{name}: is not on this machine{advice}")
    folder = read_folder(path)
    tensors = folder.checkpoint.tensors().tensors.values()
    spec, pooling = folder.spec, folder.pooling
    if pooling is None:
        makes = "text"
    else:
        makes = "scores" if pooling.score_tokens or (spec is not None and spec.scores) else "vectors"
    dtypes = Counter(tensor.dtype for tensor in tensors)
    sampling = {
        key: value for key, value in msgspec.to_builtins(folder.defaults).items() if value is not None
    }
    return Description(
        name=name,
        path=str(path),
        architecture=", ".join(folder.config.texts("architectures")),
        network="our engine" if spec is not None else "our engine, with the network of transformers",
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        dtype=", ".join(f"{dtype} ({count})" for dtype, count in dtypes.most_common()),
        bytes=sum(tensor.nbytes for tensor in tensors),
        context=folder.max_model_len,
        makes=makes,
        sampling=sampling,
    )


@contextmanager
def _bar(name: str) -> Iterator[Report]:
    """Show a progress bar during the block, on a terminal; yield the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda _fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)
