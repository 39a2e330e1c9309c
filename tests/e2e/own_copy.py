"""The demonstration model in a folder of its own, where it can be changed, or its load be held up."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairlead.config import demonstration_model


def own_copy(folder: Path, **changes: object) -> Path:
    """Copy the model into a new folder; `changes` are made to its `config.json`."""
    shutil.copytree(demonstration_model(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@contextmanager
def load_held_up(folder: Path) -> Iterator[None]:
    """Have whoever loads the model meanwhile wait for what its `config.json` says until the block is over."""
    file, again = folder / "config.json", folder / "config.json.again"
    content = file.read_bytes()
    again.write_bytes(content)
    file.unlink()
    os.mkfifo(file)
    pipe = os.open(file, os.O_RDWR)
    try:
        yield
    finally:
        os.write(pipe, content)  # for who has opened it; who has not finds a file there
        again.replace(file)
        os.close(pipe)
