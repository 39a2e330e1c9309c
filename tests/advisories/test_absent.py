"""Dangerous mechanisms are absent: unpickling, evaluation, archives, extra listening sockets."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fairlead
from advisories.target import Target
from advisories.tries import tries
from fairlead.language.structured.compiler import MOST_KEPT, GrammarCompiler
from fairlead.language.structured.grammar import ChoiceAnswer, answer_grammar
from language.structured.rendering import vocabulary

SOURCE = Path(fairlead.__file__).parent
REPOSITORY = Path(__file__).parents[2]

PICKLES = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "multiprocessing",
}
CHANNELS = {"zmq", "grpc", "xmlrpc", "socketserver", "Pyro5", "rpyc", "ray", "mooncake", "nixl"}
CLUSTER_PROGRAMS = {"distributed/ray/launcher.py", "distributed/ray/replica_actor.py"}
ARCHIVES = {"zipfile", "tarfile", "zipimport", "gzip", "bz2", "lzma", "zlib"}
DATABASES = {"sqlite3", "sqlalchemy", "psycopg", "psycopg2", "prisma", "duckdb"}
COMPILERS = {
    "xgrammar",
    "outlines",
    "outlines_core",
    "llguidance",
    "lmformatenforcer",
    "interegular",
    "diskcache",
}
MEDIA = {"PIL", "cv2", "av", "soundfile", "librosa", "torchvision", "torchaudio"}
FORMS = {"multipart", "python_multipart", "cgi", "email"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
RUNS_COMMANDS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}

PICKLE_CHANNELS = (
    "CVE-2024-9052",  # vLLM
    "CVE-2024-9053",
    "CVE-2024-11041",
    "CVE-2025-29783",
    "CVE-2025-30165",
    "CVE-2025-32444",
    "CVE-2025-47277",
    "CVE-2025-10164",  # SGLang
    "CVE-2026-3059",
    "CVE-2026-3060",
    "CVE-2026-3989",
    "CVE-2026-7301",
    "CVE-2026-7304",
    "CVE-2026-14890",
    "CVE-2026-15969",
    "CVE-2026-86793",
    "CVE-2026-93088",
    "CVE-2026-41486",  # Ray
    "CVE-2026-57516",
    "CVE-2026-96560",  # LightLLM
    "CVE-2026-103040",
    "CVE-2026-103041",
    "CVE-2026-103395",
)
PORTS = (
    "CVE-2025-30202",  # vLLM
    "CVE-2025-29783",
    "CVE-2025-32444",
    "CVE-2025-47277",
    "CVE-2026-3059",  # SGLang
    "CVE-2026-7301",
    "CVE-2026-14890",
    "CVE-2026-15971",
    "CVE-2026-93088",
    "CVE-2024-42477",  # llama.cpp's RPC server
    "CVE-2024-42478",
    "CVE-2024-42479",
    "CVE-2026-34159",
    "CVE-2026-78147",
    "CVE-2026-78148",
    "CVE-2026-86317",
    "CVE-2023-48022",  # Ray
    "CVE-2026-96560",  # LightLLM
    "CVE-2026-103040",
    "CVE-2026-103041",
    "CVE-2026-103042",
)
EVALUATIONS = (
    "CVE-2025-9141",  # vLLM
    "CVE-2026-15971",  # SGLang
    "CVE-2024-4264",  # LiteLLM
    "CVE-2024-4889",
    "CVE-2024-5751",
    "CVE-2024-6825",
    "CVE-2024-10188",
    "CVE-2026-40217",
    "CVE-2026-59821",
    "CVE-2022-45907",  # torch
)


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module of the package, parsed."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    return ((f"{name}:{node.lineno}", node) for name, node in nodes_by_type()[kind])


@cache
def nodes_by_type() -> dict[type[ast.AST], list[tuple[str, ast.AST]]]:
    """Return the names of modules and their nodes, by the nodes' type."""
    found = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            found[type(node)].append((name, node))
    return found


@cache
def imports() -> dict[str, str]:
    """Return the modules that the package imports, each with a place of such an import."""
    found = {}
    for place, node in nodes(ast.Import):
        found |= {alias.name: place for alias in node.names}
    for place, node in nodes(ast.ImportFrom):
        found[node.module or ""] = place
        found |= {f"{node.module}.{alias.name}": place for alias in node.names}
    return found


@cache
def calls() -> dict[str, list[tuple[str, ast.Call]]]:
    """Return all calls and their places, by the dotted name of the called function."""
    found: dict[str, list[tuple[str, ast.Call]]] = {}
    for place, node in nodes(ast.Call):
        found.setdefault(ast.unparse(node.func), []).append((place, node))
    return found


def places_of(module: str) -> Iterator[str]:
    """Yield the places of all imports of a module."""
    for place, node in nodes(ast.Import):
        if any(alias.name.split(".")[0] == module for alias in node.names):
            yield place
    for place, node in nodes(ast.ImportFrom):
        if (node.module or "").split(".")[0] == module:
            yield place


def imported(modules: set[str]) -> dict[str, str]:
    return {name: place for name, place in imports().items() if name.split(".")[0] in modules}


def test_scan_finds_known_imports_and_calls():
    assert imported({"msgspec", "torch"})
    assert calls()["sha256"]
    assert len(trees()) > 100


@tries(*PICKLE_CHANNELS)
def test_nothing_is_unpickled():
    # Ray unpickles what its cluster sends; only the program that starts replicas there uses it.
    assert imported(PICKLES | CHANNELS - {"ray"}) == {}
    assert {place.partition(":")[0] for place in places_of("ray")} <= CLUSTER_PROGRAMS
    assert not any(name.endswith((".loads", ".load")) and "pickle" in name for name in calls())
    assert "torch.load" not in calls()
    for name in ("numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        assert name not in calls()


@tries(*EVALUATIONS)
def test_nothing_is_evaluated():
    assert not RUNS_CODE & calls().keys()
    assert not RUNS_COMMANDS & calls().keys()
    assert not any(name.endswith("literal_eval") for name in calls())
    for name in ("subprocess.run", "subprocess.Popen", "subprocess.check_output", "trio.run_process"):
        for place, call in calls().get(name, []):
            assert not any(keyword.arg == "shell" for keyword in call.keywords), place


@tries("CVE-2025-9141", "CVE-2024-6825")
def test_no_module_is_imported_by_a_computed_name():
    for name in ("import_module", "importlib.import_module"):
        for place, call in calls().get(name, []):
            assert isinstance(call.args[0], ast.Constant), place


@tries(
    "CVE-2026-27893", "CVE-2026-90553", "CVE-2026-7669", "CVE-2026-46432", "CVE-2026-46517", "CVE-2026-5241"
)
def test_no_code_of_a_models_repository_is_trusted():
    for places in calls().values():
        for place, call in places:
            trusting = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
            assert all(ast.unparse(value) == "False" for value in trusting), place


@tries("CVE-2024-45436", "CVE-2024-7773", "CVE-2026-59820", "CVE-2024-12886")
def test_no_archive_is_unpacked_and_only_bodies_are_decompressed_in_bounded_pieces():
    assert imported(ARCHIVES) == {"zlib": imported({"zlib"})["zlib"]}
    assert imported({"zlib"})["zlib"].startswith("base/formats/content_coding.py")
    assert not any(name.endswith(("unpack_archive", "extractall")) for name in calls())


@tries("CVE-2024-4890", "CVE-2024-5225", "CVE-2025-45809", "CVE-2026-42208", "GHSA-69x8-hrgq-fjj8")
def test_only_the_store_speaks_to_a_database():
    """Its statements have parameters for all values: tests/store/test_database.py has hostile names."""
    places = imported(DATABASES)
    assert places.keys() == {"sqlite3", "psycopg"}
    assert all(place.startswith("store/") for place in places.values()), places


@tries("CVE-2025-29770", "CVE-2025-32381", "GHSA-hf3c-wxg2-49q9")
def test_no_grammar_is_kept_without_a_bound():
    # Only `language/structured/compiler.py` makes matchers of grammars; the other modules use those, or
    # convert texts.
    makers = {place.partition(":")[0] for place, _ in calls()["LLMatcher"]}
    assert makers == {"language/structured/compiler.py"}
    assert imported(COMPILERS - {"llguidance"}) == {}
    compiler = GrammarCompiler(vocabulary("json").matching)
    for number in range(MOST_KEPT + 3):
        compiler.submit(number, answer_grammar(ChoiceAnswer([str(number)])))
        while compiler.waiting:
            compiler.take_ready()
    assert len(compiler._kept) == MOST_KEPT
    compiler.close()


@tries("CVE-2026-22778", "CVE-2026-53923", "GHSA-m52c-39rh-f3gp")
def test_nothing_decodes_media_or_models_of_another_format():
    assert imported(MEDIA | {"gguf", "ggml"}) == {}


@tries("CVE-2024-8984", "CVE-2023-25577", "CVE-2023-46136", "CVE-2024-49767")
def test_no_framework_parses_a_form():
    assert {name for name in imported(FORMS) if not name.startswith("email.utils")} == set()  # dates only
    for place, node in nodes(ast.Attribute):
        assert ast.unparse(node) not in {"request.form", "request.files", "request.values"}, place


@tries("CVE-2024-34069", "CVE-2019-14806", "CVE-2016-10516")
def test_no_debugger_is_on():
    assert not any("debug" in name for name in imported({"werkzeug"}))
    for places in calls().values():
        for place, call in places:
            debug = [keyword.value for keyword in call.keywords if keyword.arg == "debug"]
            assert all(ast.unparse(value) == "False" for value in debug), place


@tries("CVE-2024-49766", "CVE-2025-66221", "CVE-2026-21860")
def test_no_file_is_found_by_a_path_that_a_client_sends():
    for name in ("safe_join", "send_file", "send_from_directory", "static_folder"):
        assert not any(called.split(".")[-1] == name for called in calls())


@tries(*PORTS)
def test_only_the_http_socket_listens(server: Target):
    assert server.listening_ports() == {server.running.address[1]}


@tries("CVE-2026-54232")
@pytest.mark.parametrize("path", sorted(SOURCE.glob("server/deploy/Dockerfile*")), ids=lambda path: path.name)
def test_no_package_can_come_from_an_unintended_index(path):
    assert re.search(r"--extra-index-url|unsafe-best-match|--find-links", path.read_text()) is None
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert re.search(r"extra-index|unsafe-best-match", text) is None
