"""A valid file, changed at random, is either accepted or refused by line; nothing else happens."""

import json
import re
from copy import deepcopy

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.base.config import Config
from fairlead.server.configfile import ConfigFileError, read_config

VALID = """\
host: 127.0.0.1
apiKeys: [{key: sk-1, user: ana, limits: {concurrent: 4}}, sk-2]
queue: {capacity: 100, timeout: 60s, classes: [high, low], tenantWeights: {ana: 2}}
startPort: 6000
macros: {server: "serve --port ${PORT}", size: 8}
models:
  qwen: {path: small, aliases: [q], slots: 8, kvCache: {evictionThreshold: 0.5}, ttl: 5m}
  other:
    macros: {size: 9}
    cmd: |
      ${server} # ${size}
      --size ${size}
    env: [A=b]
    filters: {stripParams: "a, b", setParams: {t: 0.5}, setParamsByID: {"${MODEL_ID}:x": {u: 1}}}
    timeouts: {connect: 5}
    metadata: {size: "${size}"}
groups: {g: {members: [qwen, other], swap: false}}
hooks: {on_startup: {preload: [q]}}
nodes: [{id: big, url: "http://10.0.0.2:8000", seats: 4, models: [a]}]
peers: {p: {proxy: "http://h", models: [m]}}
"""
Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C, if there is one
TREE = yaml.safe_load(VALID)
NUMBERS = (0, -1, 2**70, 1.5, float("nan"), float("inf"))
TEXTS = ("", " ", "x", "${x}", "${PORT}", "${env.NO}", "5m", "\x00", "'", "1" * 5000, "q", "http://[", "/")
TREES = (None, True, [], [[]], {}, {"a": 1}, {"": {}}, [None])
ODD = st.sampled_from([*NUMBERS, *TEXTS, *TREES])
FAULT = re.compile(r"^[^\n]*fairlead\.yaml:\d+: [^\n]+$")
WITHOUT_KEY = ("is not YAML: ", "the file is empty", "must be a mapping", "line ")  # faults of the whole file


def places(value, path=()):
    """Return the path of every value in a tree, without the tree itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in inner:
        found += [(*path, key), *places(item, (*path, key))]
    return found


def changed(draw):
    """Return the text of the valid file with one to three values replaced, dropped, renamed or moved."""
    tree = deepcopy(TREE)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(tree)))
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "replace", "drop", "rename", "move"])):
            case "replace":
                parent[path[-1]] = deepcopy(draw(ODD))
            case "drop":
                del parent[path[-1]]
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["x", "path", "cmd", "proxy", "ttl", "<<"]))] = parent.pop(
                    path[-1]
                )
            case _:
                tree[draw(st.sampled_from(["queue", "models", "x-y", "lru", "matrix"]))] = deepcopy(
                    parent[path[-1]]
                )
        if not places(tree):
            break
    return json.dumps(tree, indent=1, default=str) if draw(st.booleans()) else yaml.dump(tree, Dumper=Dumper)


def outcome(tmp_path, content: bytes, *, keys: bool = False) -> Config | None:
    """Return the configuration, or None when each line of the refusal names file and line (and key)."""
    path = tmp_path / "fairlead.yaml"
    path.write_bytes(content)
    try:
        return read_config(path, {}).config
    except ConfigFileError as error:
        for line in str(error).split("\n"):
            assert FAULT.match(line), line
        for fault in error.found if keys else ():
            assert fault.key or fault.message.startswith(WITHOUT_KEY), fault
        return None


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_value_is_accepted_or_refused_by_line_and_key(tmp_path, data):
    (tmp_path / "small").mkdir(exist_ok=True)
    outcome(tmp_path, changed(data.draw).encode(), keys=True)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(
            st.integers(0, len(VALID)),
            st.integers(0, 8),
            st.binary(max_size=4)
            | st.sampled_from(
                [
                    b"&a",
                    b"*a",
                    b"<<: ",
                    b"!!",
                    b"${",
                    b"}",
                    b"- ",
                    b"\t",
                    b": ",
                    b"? ",
                    b"|",
                    b"%",
                    b"---\n",
                    b"'",
                    b'"',
                ]
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_changed_bytes_are_accepted_or_refused_by_line(tmp_path, cuts):
    (tmp_path / "small").mkdir(exist_ok=True)
    content = VALID.encode()
    for start, length, new in cuts:
        content = content[:start] + new + content[start + length :]
    outcome(tmp_path, content)


def test_unchanged_file_is_valid(tmp_path):
    (tmp_path / "small").mkdir()
    config = outcome(tmp_path, VALID.encode())
    assert [model.name for model in config.models] == ["qwen", "other"]
    assert config.models[1].cmd[-1] == "9"
