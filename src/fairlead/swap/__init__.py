"""Which models make room for which: pure policies."""
