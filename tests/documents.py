"""What is generated and kept: the configuration's schema, the README's tables of it, Grafana's dashboard.

`python tests/documents.py` writes them anew. A test holds that they are what this would write.
"""

import json
from pathlib import Path

from fairlead.configfile.schema import schema
from fairlead.configfile.table import tables
from fairlead.telemetry.grafana import dashboard

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fairlead"
BEGIN, END = "<!-- settings: python tests/documents.py -->", "<!-- /settings -->"


def documents() -> dict[Path, str]:
    """Return what each file is to have."""
    return {
        PACKAGE / "config" / "schema.json": json.dumps(schema(), indent=1) + "\n",
        PACKAGE / "telemetry" / "grafana.json": json.dumps(dashboard(), indent=1) + "\n",
        ROOT / "README.md": _with_settings((ROOT / "README.md").read_text(encoding="utf-8")),
    }


def _with_settings(readme: str) -> str:
    """Return the README with the tables between their marks; nothing else is touched."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"README.md has no {BEGIN}"
    assert end, f"README.md has no {END}"
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
