"""The chat templates of llama.cpp's collection. They belong to the models' authors and are not kept here.

    python tests/language/text/published_templates.py

fetches them with pip, from the source distribution of `llama-cpp-python`. Without them, their tests are
skipped.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
COUNT = 70
FOLDER = Path(__file__).parents[3] / "build" / "templates"


def fetch(folder: Path) -> int:
    """Write the templates into a folder; return their number."""
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--no-deps", "--no-binary", ":all:", "--dest", temporary]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=True)
        (archive,) = Path(temporary).glob("*.tar.gz")
        folder.mkdir(parents=True, exist_ok=True)
        found = 0
        with tarfile.open(archive) as files:
            for member in files:
                path = Path(member.name)
                if path.match("models/templates/*.jinja") and (file := files.extractfile(member)) is not None:
                    (folder / path.name).write_bytes(file.read())
                    found += 1
    return found


if __name__ == "__main__":
    found = fetch(FOLDER)
    sys.exit(f"{found} templates instead of {COUNT}" if found != COUNT else 0)
