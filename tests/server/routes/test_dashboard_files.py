"""The dashboard's files: all are served, and they neither run nor request anything else."""

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

import pytest

from fairlead.base.config import ApiKey
from fairlead.nodes.node import ModelState
from fairlead.router.fleet.status import NodeAvailability, NodeKind
from fairlead.server.dashboard import pages

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(pages.__file__).parent
OUR_SCRIPTS = sorted(
    name for name in pages.assets() if name.endswith(".js") and not name.startswith("vendor/")
)
LANGUAGES = ("en", "ja", "zh")


def source(name: str) -> str:
    return pages.assets()[name].content.decode()


class Page(HTMLParser):
    """The page's references, the keys of its texts, and its inline scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.words: set[str] = set()
        self.inline: list[str] = []
        self._script = False
        self.feed(source("index.html"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.references += [given[name] for name in ("src", "href") if name in given]
        self.words |= {given[name] for name in ("data-words", "data-placeholder") if name in given}
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        self.inline += [tag] if tag == "style" else []
        self._script = tag == "script"

    def handle_data(self, text):
        if self._script and text.strip():
            self.inline.append(text)

    def handle_endtag(self, tag):
        self._script = False


def words(language: str) -> dict[str, str]:
    """Return the texts of a language's file by key."""
    return dict(re.findall(r'^  (\w+): "(.*)",$', source(f"words/{language}.js"), re.MULTILINE))


# What is served -------------------------------------------------------------------------------------


async def test_page_and_all_of_its_files_are_served_without_a_key(client_with):
    client = client_with(ApiKey(key="sesame"))
    page = await client.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>Fairlead</title>" in page.body
    for name, asset in pages.assets().items():
        reply = await client.get(f"/dashboard/{name}")
        assert (reply.status, reply.body) == (200, asset.content)
        assert asset.content_type == reply.headers["content-type"]
    assert (await client.get("/queue")).status == 401


async def test_security_policy_allows_nothing_from_other_servers(client):
    for path in ("/", "/dashboard/main.js", "/dashboard/vendor/uPlot.esm.js"):
        headers = (await client.get(path)).headers
        policy = dict(
            directive.strip().split(" ", 1) for directive in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'self'"
        assert {policy[name] for name in ("frame-ancestors", "base-uri", "object-src")} == {"'none'"}
        assert not {"script-src", "style-src", "connect-src", "img-src"} & policy.keys()
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


async def test_cached_file_is_not_sent_again(client):
    first = await client.get("/dashboard/style.css")
    again = await client.get("/dashboard/style.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    other = await client.get("/dashboard/style.css", headers={"If-None-Match": '"other"'})
    assert first.body == other.body


@pytest.mark.parametrize(
    "name", ["pages.py", "../pages.py", "..%2Fpages.py", "vendor", "vendor/", "words/../pages.py", "x" * 5000]
)
async def test_nothing_else_of_the_folder_is_served(client, name):
    reply = await client.get(f"/dashboard/{name}")
    assert (reply.status, reply.error["code"]) == (404, "not_found")


# Content --------------------------------------------------------------------------------------------


def test_everything_the_page_and_its_modules_refer_to_exists():
    local = [name for name in Page().references if not name.startswith("#")]
    assert {"dashboard/main.js", "dashboard/style.css"} <= set(local)
    required = {name.removeprefix("dashboard/") for name in local if name != "queue"}
    for script in OUR_SCRIPTS:
        for imported in re.findall(r'(?:from|import) "(.*?)"', source(script)):
            assert imported.startswith("./")
            required.add(str(PurePosixPath(script).parent / imported))
    assert required <= pages.assets().keys()
    assert set(OUR_SCRIPTS) <= required  # no script is unused


def test_no_file_of_ours_names_another_server():
    for name in pages.assets():
        if not name.startswith("vendor/"):
            markup = source(name).replace('xmlns="http://www.w3.org/2000/svg"', "")
            markup = markup.replace('"http://www.w3.org/1998/Math/MathML"', "")
            assert not re.search(r"(https?:)?//[a-z0-9-]+\.", markup), name


def test_page_runs_nothing_inline():
    assert Page().inline == []


@pytest.mark.parametrize("name", OUR_SCRIPTS)
def test_text_is_never_parsed_as_html_or_as_a_script(name):
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|setHTMLUnsafe|document\.write|parseFromString|srcdoc"
    runs = r"\beval\(|new Function|javascript:|setTimeout\(\s*[\"'`]"
    assert not re.search(f"{sinks}|{runs}|createContextualFragment", source(name))


def test_key_is_written_to_no_url_and_no_persistent_storage():
    for name in OUR_SCRIPTS:
        for line in source(name).splitlines():
            assert not ("localStorage" in line and "key" in line.lower().replace("monkey", "")), line
            assert not re.search(r"[?&](api_?)?key=", line), line


def test_vendored_plot_library_has_its_license():
    licence = (FOLDER / "vendor" / "LICENSE.uPlot").read_text()
    assert "MIT License" in licence
    version = re.search(r"\(v([\d.]+)\)", source("vendor/uPlot.esm.js"))
    assert version is not None
    assert version[1] in (FOLDER / "vendor" / "README.md").read_text()


def test_wheel_ships_every_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["fairlead"]
    package = ROOT / "src" / "fairlead"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert {FOLDER / name for name in pages.assets()} <= shipped
    assert FOLDER / "vendor" / "LICENSE.uPlot" in shipped


# Texts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_every_text_with_the_same_placeholders(language):
    def blanks(phrase: str) -> list[str]:
        return sorted(set(re.findall(r"\{\w+\}", phrase)))

    english, other = words("en"), words(language)
    assert len(english) > 80
    assert english.keys() == other.keys()
    assert {key: blanks(phrase) for key, phrase in english.items()} == {
        key: blanks(phrase) for key, phrase in other.items()
    }


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_no_other_language_has_untranslated_english_texts(language):
    english = words("en")
    same = {key for key, phrase in words(language).items() if phrase == english[key]}
    assert same == {"none"}


def test_every_text_that_is_used_exists():
    used = set(Page().words)
    for name in OUR_SCRIPTS:
        used |= set(re.findall(r'\btranslate\("(\w+)"', source(name)))
        used |= {
            word
            for pair in re.findall(r'translate\(\w[\w.]* \? "(\w+)" : "(\w+)"', source(name))
            for word in pair
        }
    assert len(used) > 40
    assert used <= words("en").keys()


def test_every_state_kind_and_total_has_a_text():
    for literal in (ModelState, NodeAvailability, NodeKind):
        assert set(literal.__args__) <= words("en").keys()
    assert set(re.findall(r'\bid: "(\w+)"', source("totals.js"))) <= words("en").keys()
