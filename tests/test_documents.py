"""The documentation: its links resolve, and its statements about the code and about results are true."""

import json
import re
from pathlib import Path

import pytest

from documents import BEGIN, DOCS, ROOT
from fairlead.base.config.spelling import spelled
from fairlead.base.errors import FairleadError
from fairlead.router.fleet.reload import FIXED
from fairlead.server.listener.refusals import code_of

PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS.glob("*.md")])
RESULTS = ROOT / "bench" / "results"
# The README is also shown by package indexes, which do not resolve relative links.
OWN_LINKS = re.compile(
    r"^https://(?:github\.com/fairlead/fairlead/blob|raw\.githubusercontent\.com/fairlead/fairlead)/main/"
)
SERVERS = ("fairlead", "vllm", "llama.cpp", "transformers")  # in the order of the README's columns
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCED.sub("", text_of(page))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section_of(page: Path, heading: str) -> str:
    """Return the text below a heading, up to the next one of its level or above."""
    level = heading.partition(" ")[0]
    _, found, rest = text_of(page).partition(f"\n{heading}\n")
    assert found, f"{page.name} has no {heading}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    broken = []
    for absolute in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        link = OWN_LINKS.sub("", absolute)
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_links_of_the_readme_are_absolute():
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(ROOT / "README.md"))
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_refers_to_nothing_outside_the_repository(page):
    assert re.findall(r"\bspec \d|\bseed \d{3}|\[00\d\]|\.\./shared", text_of(page)) == []


def test_every_page_is_linked_from_the_readme():
    readme = text_of(ROOT / "README.md")
    assert [page.name for page in DOCS.glob("*.md") if f"/docs/{page.name})" not in readme] == []


def test_readme_is_short_and_has_the_commands_to_install_and_to_test():
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 150
    mark = lines.index("<!-- test-command -->")
    assert lines[mark + 1 : mark + 4] == ["```sh", "pip install -e '.[test]' && python tests/check.py", "```"]
    assert "pip install . && fairlead serve" in lines


def test_readme_installs_the_cpu_build_of_the_torch_that_the_package_requires():
    (required,) = re.findall(r'"(torch[^"]+)"', text_of(ROOT / "pyproject.toml"))
    command = f"pip install '{required}' --index-url https://download.pytorch.org/whl/cpu"
    assert command in text_of(ROOT / "README.md")
    assert command in text_of(DOCS / "models-and-hardware.md")


def test_figures_of_the_readme_are_those_of_the_result_files():
    measured = {}
    for file, model in (("peers_all_smollm2_135m", "SmolLM2-135M"), ("peers_qwen2_5_0_5b", "Qwen2.5-0.5B")):
        medians = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["medians"]
        levels = [list(medians.get(server, {}).values()) for server in SERVERS]
        for row, figure in (("tokens/s", "output_tokens_per_s"), ("first token", "ttft_p50_ms")):
            cells = [" / ".join(f"{level[figure]:.0f}" for level in of_server) for of_server in levels]
            measured[f"{model}, {row}"] = [cell or "–" for cell in cells]
    rows = (line.strip("| ").split(" | ") for line in text_of(ROOT / "README.md").splitlines())
    assert {row[0]: row[1:] for row in rows if row[0] in measured} == measured


def test_every_result_file_is_explained():
    page = text_of(DOCS / "benchmarks.md")
    assert [file.name for file in sorted(RESULTS.iterdir()) if f"`{file.name}`" not in page] == []


def test_every_script_and_test_that_a_page_names_exists():
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"(?<![\w/])((?:bench|tests)/[\w/]+\.py)", text_of(page))
    }
    assert sorted((page, name) for page, name in named if not (ROOT / name).is_file()) == []


def test_every_module_that_the_architecture_names_exists():
    page = text_of(ROOT / "ARCHITECTURE.md")
    named = set(re.findall(r"`([\w/]+\.(?:pyx|pxd|pxi|py|md|h|c))`", page)) - {
        "language/checkpoint/NAME.py",
        "cext/cpustep/format_NAME.h",
    }
    folders = (ROOT, ROOT / "src" / "fairlead")
    assert sorted(name for name in named if not any((folder / name).exists() for folder in folders)) == []


def test_every_error_code_is_documented_with_its_status():
    def kinds(kind: type[FairleadError]) -> set[type[FairleadError]]:
        return {kind}.union(*(kinds(each) for each in kind.__subclasses__()))

    here = {kind for kind in kinds(FairleadError) if kind.__module__.startswith("fairlead.")}
    codes = {(str(kind.status), kind.code) for kind in here}
    codes |= {(str(status), code_of(status)) for status in (405, 408, 417, 431, 500, 503, 505)}
    rows = re.findall(r"^\| (\d{3}) \| (.+?) \|", section_of(DOCS / "http-api.md", "## Errors"), re.MULTILINE)
    documented = {(status, code) for status, cell in rows for code in re.findall(r"`(\w+)`", cell)}
    assert documented == codes


def test_settings_that_need_a_restart_are_documented():
    section = section_of(DOCS / "configuration.md", "## Reloading")
    (listed,) = re.findall(r"need a restart[^:]*: (.+?)\.$", section, re.DOTALL | re.MULTILINE)
    assert re.findall(r"`(\w+)`", listed) == [spelled(name) for name in FIXED]


def test_alerts_use_metrics_that_exist():
    page = text_of(DOCS / "operations.md")
    _, _, rest = page.partition(BEGIN.format(name="metrics"))
    table, _, _ = rest.partition("### Alerts")
    known = set(re.findall(r"^\| `([\w:]+)`", table, re.MULTILINE))
    used = set(re.findall(r"fairlead_\w+", section_of(DOCS / "operations.md", "### Alerts")))
    assert {name.removesuffix("_bucket") for name in used} <= known
