"""`docs/llama-swap.md` names every setting of llama-swap that has no effect here."""

from pathlib import Path

import pytest

from fairlead.server.configfile.llama_swap import WITHOUT_EFFECT

PAGE = (Path(__file__).parents[3] / "docs" / "llama-swap.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", WITHOUT_EFFECT, ids=".".join)
def test_page_names_each_setting_without_effect(pattern):
    # For settings of a model or a peer, the page has only the last parts of the name.
    name = ".".join(pattern[pattern.index("*") + 1 :] if "*" in pattern else pattern)
    *_, last = pattern
    assert f"`{name}`" in PAGE or f"`{last}`" in PAGE


@pytest.mark.parametrize("name", ["sendLoadingState", "includeAliasesInList", "/upstream/MODEL/…"])
def test_page_has_a_section_for_each_setting_that_differs(name):
    assert f"\n## `{name}`\n" in PAGE
