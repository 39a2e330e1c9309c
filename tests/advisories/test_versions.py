"""The minimum versions of the dependencies exclude versions with known vulnerabilities."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from advisories.tries import tries_each

# By advisory: the library and its first version without the vulnerability.
FIXED = {
    "CVE-2025-43859": ("h11", "0.16"),
    "CVE-2025-57804": ("h2", "4.3"),
    "CVE-2026-71554": ("h2", "4.4.1"),
    "CVE-2024-56201": ("jinja2", "3.1.5"),
    "CVE-2024-56326": ("jinja2", "3.1.5"),
    "CVE-2025-27516": ("jinja2", "3.1.6"),
    "CVE-2022-45907": ("torch", "1.13.1"),
    "CVE-2025-32434": ("torch", "2.6"),
    "CVE-2026-1839": ("transformers", "5"),
    "CVE-2026-4372": ("transformers", "5.3"),
    "CVE-2026-5241": ("transformers", "5.5"),
    "CVE-2026-9856": ("transformers", "5.10"),
}


def minimum_versions() -> dict[str, Version]:
    """Return the lowest version of each library that `pyproject.toml` allows, including users' extras."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {}
    for line in [*project["dependencies"], *extras["hf"], *extras["otel"]]:
        requirement = Requirement(line)
        (minimum,) = (one.version for one in requirement.specifier if one.operator == ">=")
        found[requirement.name] = Version(minimum)
    return found


@tries_each(*FIXED)
def test_no_version_with_the_vulnerability_is_allowed(number):
    library, fixed = FIXED[number]
    assert minimum_versions()[library] >= Version(fixed)
