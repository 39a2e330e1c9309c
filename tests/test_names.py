"""A public class name occurs once in the package, so that a name in an error or a search is unambiguous."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYX_CLASS = re.compile(r"^(?:cdef )?class (\w+)", re.MULTILINE)


def test_each_public_class_name_occurs_once():
    definitions = defaultdict(set)
    for path in ROOT.glob("src/fairlead/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                definitions[node.name].add(f"{path.relative_to(ROOT)}:{node.lineno}")
    # Stubs repeat the classes of these files, and a test compares the two.
    for path in ROOT.glob("cext/**/*.p[xy][ix]"):
        for match in PYX_CLASS.finditer(path.read_text()):
            definitions[match[1]].add(str(path.relative_to(ROOT)))
    repeated = {
        name: sorted(found) for name, found in definitions.items() if len(found) > 1 and name[0] != "_"
    }
    assert repeated == {}
