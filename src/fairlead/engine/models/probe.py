"""Reads folders of models that transformers implements, for commands whose process imports no torch.

Run as a program: its input is a JSON object of folders and length limits by name; its last line of output is
the JSON object of the reasons why some cannot be loaded.
"""

import json
import sys
from pathlib import Path

import torch

from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from fairlead.engine.models.loader import read_source


def main() -> None:
    """Read what standard input names, and print the faults."""
    faults = {}
    for name, (folder, max_model_len) in json.load(sys.stdin).items():
        try:
            read_source(
                Path(folder), device=torch.device("cpu"), needs_head=False, max_model_len=max_model_len
            )
        except (LoadFailed, ConfigError) as error:
            faults[name] = str(error)
    print(json.dumps(faults))  # noqa: T201  the parent reads it


if __name__ == "__main__":
    main()
