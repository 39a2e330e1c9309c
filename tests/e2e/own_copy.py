"""A copy of the demonstration model, which a test can change and prevent from loading."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairlead.base.config import demonstration_model


def own_copy(folder: Path, **changes: object) -> Path:
    """Copy the model into a new folder; merge `changes` into its `config.json`."""
    shutil.copytree(demonstration_model(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@contextmanager
def blocked_load(folder: Path) -> Iterator[None]:
    """Make each load of the model wait for the content of `config.json` until the `with` block ends."""
    file, again = folder / "config.json", folder / "config.json.again"
    content = file.read_bytes()
    again.write_bytes(content)
    file.unlink()
    os.mkfifo(file)
    pipe = os.open(file, os.O_RDWR)
    try:
        yield
    finally:
        os.write(pipe, content)  # for a process which has opened the pipe; all others find the file again
        again.replace(file)
        os.close(pipe)
